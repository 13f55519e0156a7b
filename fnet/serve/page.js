"use strict";
const $ = id => document.getElementById(id);
const state = {models: {}, name: "", kind: "", size: null};

async function call(path, body) {
  const headers = body ? {"Content-Type": "application/json"} : {};
  if ($("token").value) headers.Authorization = "Bearer " + $("token").value;
  const response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body)});
  if (!response.ok) throw new Error((await response.json()).error || response.statusText);
  return response;
}
const infer = (name, inputs) => call(`/v2/models/${name}/infer`, {inputs}).then(r => r.json());

function element(tag, text, parent) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}
function guarded(action) {
  return async event => {
    $("error").textContent = "";
    try { await action(event); } catch (error) { $("error").textContent = error.message; }
  };
}

// An image: shape [batch, height, width, 1 or 3], sizes that are not fixed are 224.
function imageShape(meta) {
  if (meta.inputs.length !== 1) return null;
  const shape = meta.inputs[0].shape;
  if (shape.length !== 4 || ![1, 3].includes(shape[3])) return null;
  return [shape[1] < 0 ? 224 : shape[1], shape[2] < 0 ? 224 : shape[2], shape[3]];
}

async function load() {
  const rows = await call("/v2/repository/index", {}).then(r => r.json());
  $("model").replaceChildren();
  for (const row of rows) {
    const option = element("option", row.kind === "generate" ? row.name + " (text)" : row.name, $("model"));
    option.value = row.kind + ":" + row.name;
  }
  for (const name of new Set(rows.filter(row => row.kind === "infer").map(row => row.name)))
    state.models[name] = await call(`/v2/models/${name}`).then(r => r.json());
  if (rows.length) select();
}

function select() {
  const [kind, name] = $("model").value.split(":");
  const meta = state.models[name];
  state.name = name;
  state.size = kind === "infer" ? imageShape(meta) : null;
  state.kind = kind === "generate" ? "text" : state.size ? "image" : "tensors";
  for (const id of ["image", "text", "tensors"]) $(id).hidden = id !== state.kind;
  $("signature").textContent = meta ? meta.parameters.signature : name;
  $("result").replaceChildren();
  if (state.kind === "tensors") {
    const example = x => {
      const shape = x.shape.map(n => n < 0 ? 1 : n), size = shape.reduce((a, b) => a * b, 1);
      return {name: x.name, shape, datatype: x.datatype, data: Array(Math.min(size, 100000)).fill(x.datatype === "BOOL" ? false : 0)};
    };
    $("json").value = JSON.stringify({inputs: meta.inputs.map(example)}, null, 1);
  }
  if (state.size) {
    $("canvas").height = 280; $("canvas").width = Math.round(280 * state.size[1] / state.size[0]);
    clear();
  }
}

const pen = $("canvas").getContext("2d", {willReadFrequently: true});
function clear() { pen.fillStyle = "#000"; pen.fillRect(0, 0, $("canvas").width, $("canvas").height); }
function draw(event) {
  if (!event.buttons) return;
  const box = $("canvas").getBoundingClientRect();
  const x = (event.clientX - box.left) * $("canvas").width / box.width;
  const y = (event.clientY - box.top) * $("canvas").height / box.height;
  pen.fillStyle = "#fff"; pen.beginPath(); pen.arc(x, y, 11, 0, 7); pen.fill();
}

async function sendImage() {
  const [height, width, channels] = state.size;
  const small = document.createElement("canvas"); small.width = width; small.height = height;
  const context = small.getContext("2d"); context.drawImage($("canvas"), 0, 0, width, height);
  const rgba = context.getImageData(0, 0, width, height).data, bytes = [];
  for (let i = 0; i < rgba.length; i += 4)
    if (channels === 3) bytes.push(rgba[i], rgba[i + 1], rgba[i + 2]);
    else bytes.push(Math.round(0.299 * rgba[i] + 0.587 * rgba[i + 1] + 0.114 * rgba[i + 2]));
  const shape = [1, height, width, channels], name = state.name;
  let input = {...state.models[name].inputs[0], shape, data: bytes};
  if (input.datatype !== "UINT8") {
    const prepare = state.models[name + ".preprocess"];
    if (prepare) {
      const made = (await infer(name + ".preprocess", [{...prepare.inputs[0], shape, data: bytes}])).outputs[0];
      input = {...made, name: input.name};
    } else input.data = bytes.map(x => x / 255);
  }
  show(await infer(name, [input]));
}

function show(response) {
  $("result").replaceChildren();
  const labels = state.models[state.name].parameters.labels;
  for (const output of response.outputs) {
    if (labels && output.data.length === labels.length) {
      const top = Math.max(...output.data), weights = output.data.map(x => Math.exp(x - top));
      const total = weights.reduce((a, b) => a + b, 0), table = element("table", undefined, $("result"));
      labels.map((label, i) => [weights[i] / total, label]).sort((a, b) => b[0] - a[0]).slice(0, 5).forEach(([p, label]) => {
        const row = element("tr", undefined, table);
        element("td", label, row); element("td", (100 * p).toFixed(1) + " %", row);
        element("meter", undefined, element("td", undefined, row)).value = p;
      });
    } else {
      element("p", `${output.name}: ${output.datatype} [${output.shape}]`, $("result"));
      element("pre", output.data.slice(0, 1000).join(", ") + (output.data.length > 1000 ? ", ..." : ""), $("result"));
    }
  }
}

async function sendText() {
  $("result").replaceChildren();
  const output = element("pre", $("prompt").value, $("result"));
  const response = await call(`/v2/models/${state.name}/generate_stream`, {
    text_input: $("prompt").value, max_tokens: Number($("count").value), temperature: Number($("temperature").value),
    seed: Math.floor(Math.random() * 2 ** 31)});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {done, value} = await reader.read();
    if (done) break;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) output.textContent += JSON.parse(event.slice(6)).text_output || "";
  }
}

async function send() {
  if (state.kind === "image") await sendImage();
  else if (state.kind === "text") await sendText();
  else show(await call(`/v2/models/${state.name}/infer`, JSON.parse($("json").value)).then(r => r.json()));
}

$("model").addEventListener("change", guarded(select));
$("token").addEventListener("change", guarded(load));
$("send").addEventListener("click", guarded(send));
$("clear").addEventListener("click", clear);
$("canvas").addEventListener("pointerdown", draw);
$("canvas").addEventListener("pointermove", draw);
$("file").addEventListener("change", guarded(async event => {
  const image = await createImageBitmap(event.target.files[0]);
  pen.drawImage(image, 0, 0, $("canvas").width, $("canvas").height);
}));
clear();
guarded(load)();
