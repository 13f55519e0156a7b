"use strict";
const $ = id => document.getElementById(id);
const CONFIG = JSON.parse($("data").textContent);
const {height, width, channels} = CONFIG;
const pen = $("canvas").getContext("2d", {willReadFrequently: true}), small = $("input").getContext("2d");
$("canvas").width = Math.round(280 * width / height);
$("input").width = width; $("input").height = height;
const fail = error => { $("error").textContent = error.message || error; };
if (location.protocol === "file:")
  fail("Browsers do not load models from files. Serve this folder: python -m http.server");
let changed = () => {}, last = null, busy = false, waiting = false;

function clear() {
  pen.fillStyle = "#000"; pen.fillRect(0, 0, $("canvas").width, $("canvas").height);
  small.fillStyle = "#000"; small.fillRect(0, 0, width, height);
  $("answer").textContent = ""; $("classes").replaceChildren(); last = null;
}
function draw(event) {
  if (!event.buttons) { last = null; return; }
  const box = $("canvas").getBoundingClientRect();
  const at = [(event.clientX - box.left) * $("canvas").width / box.width,
              (event.clientY - box.top) * $("canvas").height / box.height];
  pen.strokeStyle = "#fff"; pen.lineWidth = 32; pen.lineCap = pen.lineJoin = "round";
  pen.beginPath(); pen.moveTo(...(last || at)); pen.lineTo(...at); pen.stroke();
  last = at;
  changed();
}

// The drawing, scaled and moved to the middle of the image, as brightness from 0 to 255: the mean of each pixel's area.
function image() {
  const w = $("canvas").width, h = $("canvas").height, rgba = pen.getImageData(0, 0, w, h).data;
  let x0 = w, x1 = 0, y0 = h, y1 = 0;
  for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) if (rgba[4 * (y * w + x)] > 127) {
    x0 = Math.min(x0, x); x1 = Math.max(x1, x + 1); y0 = Math.min(y0, y); y1 = Math.max(y1, y + 1);
  }
  if (x1 <= x0) return null;
  const inside = 1 - 2 * CONFIG.margin, scale = Math.max((x1 - x0) / (width * inside), (y1 - y0) / (height * inside));
  const left = (x0 + x1 - scale * width) / 2, top = (y0 + y1 - scale * height) / 2, values = new Uint8Array(height * width);
  for (let i = 0; i < height; i++) for (let j = 0; j < width; j++) {
    let sum = 0, count = 0;
    for (let y = Math.round(top + i * scale); y < Math.round(top + (i + 1) * scale); y++)
      for (let x = Math.round(left + j * scale); x < Math.round(left + (j + 1) * scale); x++, count++)
        if (x >= 0 && x < w && y >= 0 && y < h) sum += rgba[4 * (y * w + x)];
    values[i * width + j] = Math.round(sum / Math.max(count, 1));
  }
  return values;
}

function show(values, scores) {
  const pixels = small.createImageData(width, height);
  values.forEach((value, i) => pixels.data.set([value, value, value, 255], 4 * i));
  small.putImageData(pixels, 0, 0);
  const top = Math.max(...scores), weights = scores.map(x => Math.exp(x - top)), total = weights.reduce((a, b) => a + b, 0);
  $("answer").textContent = CONFIG.labels[scores.indexOf(top)];
  $("classes").replaceChildren(...weights.map((weight, i) => {
    const row = document.createElement("tr");
    for (const content of [CONFIG.labels[i], (100 * weight / total).toFixed(1) + " %", document.createElement("meter")])
      row.insertCell().append(content);
    row.querySelector("meter").value = weight / total;
    return row;
  }));
}

$("canvas").addEventListener("pointerdown", event => { last = null; draw(event); });
$("canvas").addEventListener("pointermove", draw);
$("clear").addEventListener("click", clear);
clear();

async function start() {
  try {
    const ort = await import("./" + CONFIG.runtime);
    ort.env.wasm.numThreads = 1;
    const open = file => ort.InferenceSession.create(file, {executionProviders: ["wasm"]});
    const model = await open("model.onnx"), prepare = CONFIG.preprocess && await open("preprocess.onnx");
    const run = async (session, x) => (await session.run({[session.inputNames[0]]: x}))[session.outputNames[0]];
    const shape = [1, height, width, channels];
    changed = async () => {
      if (busy) { waiting = true; return; }
      busy = true;
      try {
        do {
          waiting = false;
          const values = image();
          if (!values) continue;
          const bytes = Uint8Array.from({length: values.length * channels}, (_, i) => values[Math.floor(i / channels)]);
          const pixels = new ort.Tensor("uint8", bytes, shape);
          const x = prepare ? await run(prepare, pixels) : CONFIG.dtype === "uint8" ? pixels
            : new ort.Tensor("float32", Float32Array.from(bytes, value => value / 255), shape);
          show(values, Array.from((await run(model, x)).data));
        } while (waiting);
      } catch (error) { fail(error); }
      busy = false;
    };
    document.body.dataset.ready = "yes";
    changed();
  } catch (error) { fail(error); }
}
start();
