"use strict";
// One chart: curves and bands over steps, as SVG.
const NS = "http://www.w3.org/2000/svg";
function element(tag, attributes, ...content) {
  const made = tag.startsWith("svg:") ? document.createElementNS(NS, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...content);
  return made;
}
const svg = (tag, attributes, ...content) => element("svg:" + tag, attributes, ...content);
const DASHES = ["", "6 4", "2 3", "9 3 2 3", "1 4"];

function number(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(+value.toPrecision(4));
}
function counted(value) {
  if (value >= 1e6) return +(value / 1e6).toPrecision(4) + " M";
  return value >= 1e4 ? +(value / 1e3).toPrecision(4) + " k" : String(value);
}
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1), power = 10 ** Math.floor(Math.log10(rough)), made = [];
  const step = [1, 2, 5, 10].map(k => k * power).find(each => each >= rough) || power;
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9 && made.length < 50; k++) made.push(k * step);
  return made;
}
function logTicks(low, high) {
  const made = [], decades = Math.log10(high / low);
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)) && made.length < 60; e++) {
    for (const k of decades > 4 ? [1] : decades > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 4, 5, 7]) {
      const value = k * 10 ** e;
      if (value >= low * 0.999 && value <= high * 1.001) made.push(value);
    }
  }
  const skip = Math.ceil(made.length / 9);
  return made.filter((_, k) => k % skip === 0);
}

// The exponential moving average, without the bias towards the first value.
function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0, total = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

// Mean, least and largest of several curves, at the steps where at least one has a value; in between, curves are lines.
function band(curves) {
  const steps = [...new Set(curves.flatMap(curve => curve.steps))].sort((a, b) => a - b);
  const at = (curve, step) => {
    const { steps, values } = curve;
    if (step < steps[0] || step > steps.at(-1)) return null;
    let low = 0, high = steps.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (steps[middle] <= step) low = middle; else high = middle; }
    if (steps[high] === step) return values[high];
    if (values[low] === null || steps[low] === step) return values[low];
    if (values[high] === null) return null;
    return values[low] + (values[high] - values[low]) * (step - steps[low]) / (steps[high] - steps[low]);
  };
  const made = { steps: [], values: [], low: [], high: [] };
  for (const step of steps) {
    const found = curves.map(curve => at(curve, step)).filter(value => value !== null);
    made.steps.push(step);
    made.values.push(found.length ? found.reduce((a, b) => a + b, 0) / found.length : null);
    made.low.push(found.length ? Math.min(...found) : null);
    made.high.push(found.length ? Math.max(...found) : null);
  }
  return made;
}

// Draws curves, each {steps, values, raw, low, high, color, dash}, and returns how to find what is at a position.
function plot(holder, curves, { log, zero }) {
  const W = Math.max(holder.clientWidth, 200), H = holder.clientHeight || 270, left = 54, right = 10, top = 10, bottom = 26;
  const usable = value => value !== null && value !== undefined && (!log || value > 0);
  let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
  for (const { steps, values, low, high, raw } of curves) {
    steps.forEach((step, k) => {
      for (const value of [values[k], low && low[k], high && high[k], raw && raw[k]]) {
        if (!usable(value)) continue;
        x0 = Math.min(x0, step); x1 = Math.max(x1, step); y0 = Math.min(y0, value); y1 = Math.max(y1, value);
      }
    });
  }
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, "aria-hidden": "true" });
  holder.replaceChildren(picture);
  if (x0 > x1) {
    picture.append(svg("text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, log ? "nothing above 0 to show" : "no finite values"));
    return null;
  }
  if (zero && !log) y0 = Math.min(0, y0);
  if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (log) { const pad = Math.max((y1 / y0) ** 0.04, 1.02); y0 /= pad; y1 *= pad; }
  else { const pad = (y1 - y0) * 0.05 || Math.abs(y1) * 0.05 || 1; y0 = zero && y0 === 0 ? 0 : y0 - pad; y1 += pad; }
  const X = step => left + (step - x0) / (x1 - x0) * (W - left - right);
  const Y = value => {
    const part = log ? Math.log(value / y0) / Math.log(y1 / y0) : (value - y0) / (y1 - y0);
    return top + (1 - part) * (H - top - bottom);
  };
  for (const value of log ? logTicks(y0, y1) : ticks(y0, y1, 5)) {
    picture.append(svg("line", { class: "grid", x1: left, x2: W - right, y1: Y(value), y2: Y(value) }),
      svg("text", { x: left - 8, y: Y(value) + 4, "text-anchor": "end" }, number(+value.toPrecision(10))));
  }
  for (const step of ticks(x0, x1, Math.floor(W / 110))) {
    if (step < 0 || step !== Math.round(step)) continue;
    picture.append(svg("text", { x: X(step), y: H - 8, "text-anchor": "middle" }, counted(step)));
  }
  const line = (steps, values) => {
    let path = "", pen = false;
    steps.forEach((step, k) => {
      if (!usable(values[k])) { pen = false; return; }
      path += `${pen ? "L" : "M"}${X(step).toFixed(1)} ${Y(values[k]).toFixed(1)}`;
      pen = true;
    });
    return path;
  };
  for (const curve of curves) {
    const set = (made, color) => { made.style.setProperty("--color", `var(--p${color % 8})`); picture.append(made); return made; };
    const { steps, values, low, high, raw, color, dash } = curve;
    if (low) {
      const kept = steps.map((_, k) => k).filter(k => usable(low[k]) && usable(high[k]));
      const forth = kept.map(k => `${X(steps[k]).toFixed(1)} ${Y(high[k]).toFixed(1)}`);
      const back = kept.reverse().map(k => `${X(steps[k]).toFixed(1)} ${Y(low[k]).toFixed(1)}`);
      if (forth.length) set(svg("path", { class: "band", d: "M" + [...forth, ...back].join("L") + "Z" }), color);
    }
    if (raw) set(svg("path", { class: "raw", d: line(steps, raw) }), color);
    set(svg("path", { class: "curve", d: line(steps, values), "stroke-dasharray": DASHES[dash % DASHES.length] }), color);
    if (steps.filter((_, k) => usable(values[k])).length < 2) {
      steps.forEach((step, k) => { if (usable(values[k])) set(svg("circle", { class: "mark", cx: X(step), cy: Y(values[k]), r: 3.5 }), color); });
    }
  }
  const cursor = svg("g", {});
  picture.append(cursor);
  return {
    // The step nearest to a position, and the value of each curve there.
    near(clientX) {
      const area = holder.getBoundingClientRect(), wanted = x0 + ((clientX - area.left) * W / area.width - left) / (W - left - right) * (x1 - x0);
      let best = null;
      for (const { steps, values } of curves) {
        steps.forEach((step, k) => { if (usable(values[k]) && (best === null || Math.abs(step - wanted) < Math.abs(best - wanted))) best = step; });
      }
      const rows = [];
      cursor.replaceChildren(svg("line", { class: "cursor", x1: X(best), x2: X(best), y1: top, y2: H - bottom }));
      for (const curve of curves) {
        let k = -1;
        curve.steps.forEach((step, i) => { if (step <= best && usable(curve.values[i])) k = i; });
        if (k < 0) continue;
        const mark = svg("circle", { class: "mark", cx: X(curve.steps[k]), cy: Y(curve.values[k]), r: 4 });
        mark.style.setProperty("--color", `var(--p${curve.color % 8})`);
        cursor.append(mark);
        rows.push([curve, curve.values[k], curve.low ? [curve.low[k], curve.high[k]] : null]);
      }
      return { step: best, rows };
    },
    steps: [...new Set(curves.flatMap(curve => curve.steps))].sort((a, b) => a - b),
    toClient(step) { const area = holder.getBoundingClientRect(); return area.left + X(step) * area.width / W; },
    leave() { cursor.replaceChildren(); },
  };
}
