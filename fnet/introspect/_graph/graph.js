// The page of a graph: what is shown, and what the reader does with it.
const $ = id => document.getElementById(id), view = $("view"), NS = "http://www.w3.org/2000/svg", ROOT = NODES[0];
let metric = D.color, chosen = null, focused = null, scale = 1, offset = [0, 0], world, hot;

const total = () => ROOT[metric === "time" ? "seconds" : metric] || 0;
const share = node => total() ? (node[metric === "time" ? "seconds" : metric] || 0) / total() : 0;
const percent = value => value === 0 ? "0 %" : value < 0.001 ? "< 0.1 %" : (100 * value).toFixed(value < 0.1 ? 1 : 0) + " %";
function si(value, unit) {
  if (value === null || value === undefined) return "unknown";
  for (const [factor, prefix] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (value >= factor * 0.9995) return +(value / factor).toPrecision(3) + " " + prefix + unit;
  }
  return +value.toPrecision(3) + (unit ? " " + unit : "");
}
function time(seconds) {
  for (const [factor, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
    if (seconds >= factor) return +(seconds / factor).toPrecision(3) + " " + unit;
  }
  return +(seconds * 1e9).toPrecision(3) + " ns";
}

function element(tag, attributes, ...content) {
  const made = tag.startsWith("svg:") ? document.createElementNS(NS, tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
  made.append(...content);
  return made;
}
const svg = (tag, attributes, ...content) => element("svg:" + tag, attributes, ...content);
const step = node => D.steps.filter(limit => share(node) >= limit).length;

function label(node) {
  const facts = [node.name, node.badge, node.kind === "scope" ? "" : node.kind, node.type,
    node.parameters ? si(node.parameters, "parameters") : "", percent(share(node)) + " of the cost"];
  return facts.filter(Boolean).join(", ");
}

function item(node, kind) {
  const made = svg("g", { "data-id": node.id, role: "treeitem", tabindex: -1, "aria-level": node.depth,
    "aria-label": label(node), class: kind });
  if (node.children.length) made.setAttribute("aria-expanded", expanded.has(node.id));
  node.element = made;
  world.append(made);
  return made;
}

const paint = {
  frame(node, x, y, w, h) {
    const made = item(node, "");
    made.append(svg("rect", { class: "frame", x, y, width: w, height: h, rx: 10 }));
    const text = svg("text", { class: "title", x: x + 12, y: y + 21 }, svg("tspan", { class: "name" }, "− " + node.short));
    if (node.badge) text.append(svg("tspan", { class: "badge", dx: 8 }, node.badge));
    titles.push(text);
  },
  box(node, x, y, w, h) {
    const made = item(node, "s" + step(node)), rx = node.kind === "input" || node.kind === "result" ? h / 2 : 7;
    if (node.badge.startsWith("×")) made.append(svg("rect", { class: "box", x: x + 4, y: y + 4, width: w, height: h, rx }));
    made.append(svg("rect", { class: "box", x, y, width: w, height: h, rx }));
    const title = svg("text", { x: x + w / 2, y: y + (node.line ? 20 : 19.5), "text-anchor": "middle" },
      svg("tspan", { class: node.children.length ? "name" : "" }, (node.children.length ? "+ " : "") + node.short));
    if (node.badge) title.append(svg("tspan", { class: "badge", dx: 6 }, node.badge));
    made.append(title);
    if (node.line) made.append(svg("text", { class: "line", x: x + w / 2, y: y + 36, "text-anchor": "middle" }, node.line));
  },
  edge(d, arrow, cross) {
    const made = svg("path", { class: cross ? "edge cross" : "edge", d });
    if (arrow) made.setAttribute("marker-end", "url(#arrow)");
    world.append(made);
  },
  label(text, x, y) { labels.push([text, x, y]); },
};
let labels = [], titles = [];      // drawn last, above the lines

function render() {
  const active = focused;
  view.replaceChildren(svg("defs", {}, svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7,
    markerHeight: 7, orient: "auto" }, svg("path", { d: "M0 0L8 4L0 8z" }))));
  world = svg("g", {});
  view.append(world);
  labels = [];
  titles = [];
  for (const node of NODES) node.at = node.element = null;
  if (D.columns) columns(ROOT, paint);
  else { measure(ROOT); inside(ROOT, Z.pad, Z.pad, 0, 0, false, paint); }
  for (const [text, x, y] of labels) world.append(svg("rect", { class: "under", x: x - 3 * text.length, y: y - 10, width: 6 * text.length,
    height: 13 }), svg("text", { class: "type", x, y, "text-anchor": "middle" }, text));
  hot = svg("g", {});
  world.append(...titles, hot);
  move();
  (visible(active || ROOT.children[0]) || ROOT.children[0]).element.setAttribute("tabindex", 0);
  if (chosen) choose(visible(chosen), false);
}

const move = () => world.setAttribute("transform", `translate(${offset}) scale(${scale})`);
function visible(node) {
  let found = node;
  for (let above = node; above && above !== ROOT; above = NODES[above.parent]) if (!above.element) found = NODES[above.parent];
  return found && found !== ROOT ? found : null;
}

function fit() {
  const box = world.getBBox(), [w, h] = [view.clientWidth, view.clientHeight];
  const whole = Math.min(w / (box.width + 48), h / (box.height + 48));
  scale = Math.min(1.15, Math.max(whole, 0.62));      // text stays readable; the rest is below
  if (whole < 0.62 && Math.abs(whole - scale) > 0.4 && box.width * scale > w) scale = Math.max(0.5, Math.min(scale, w / (box.width + 48)));
  offset = [Math.max((w - box.width * scale) / 2, 24) - box.x * scale, Math.max((h - box.height * scale) / 2, 24) - box.y * scale];
  move();
}
function fitAll() {
  const box = world.getBBox(), [w, h] = [view.clientWidth, view.clientHeight];
  scale = Math.min(1.15, w / (box.width + 48), h / (box.height + 48));
  offset = [(w - box.width * scale) / 2 - box.x * scale, (h - box.height * scale) / 2 - box.y * scale];
  move();
}
function zoom(factor, x = view.clientWidth / 2, y = view.clientHeight / 2) {
  const next = Math.min(4, Math.max(0.03, scale * factor));
  offset = [x - (x - offset[0]) * next / scale, y - (y - offset[1]) * next / scale];
  scale = next;
  move();
}

function toggle(node, open = !expanded.has(node.id)) {
  if (!node.children.length) return;
  const before = (visible(node) || ROOT.children[0]).at;
  if (open) expanded.add(node.id); else expanded.delete(node.id);
  render();
  const after = node.at || before;      // its corner stays where it was
  offset = [offset[0] + (before[0] - after[0]) * scale, offset[1] + (before[1] - after[1]) * scale];
  move();
}

function reveal(node) {
  for (let above = NODES[node.parent]; above; above = NODES[above.parent]) expanded.add(above.id);
  render();
  choose(node);
  const [x, y, w, h] = node.at;
  scale = Math.max(scale, 0.8);
  offset = [view.clientWidth / 2 - (x + w / 2) * scale, view.clientHeight / 2 - (y + h / 2) * scale];
  move();
  focus(node);
}

function focus(node) {
  if (!node || !node.element) return;
  for (const other of view.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", -1);
  node.element.setAttribute("tabindex", 0);
  node.element.focus({ preventScroll: true });
  const [x, y, w, h] = node.at.map((v, i) => v * scale + (i < 2 ? offset[i] : 0)), [W, H] = [view.clientWidth, view.clientHeight];
  if (x < 0 || x + Math.min(w, W) > W || y < 0 || y + Math.min(h, 80) > H) {
    offset = [offset[0] + W / 2 - x - w / 2, offset[1] + H / 2 - y - Math.min(h, H) / 2];
    move();
  }
}

// Details.

const within = (node, scope) => { for (let n = node; n; n = NODES[n.parent]) if (n === scope) return true; return false; };
function connections(node) {
  const incoming = new Map(), outgoing = new Map();
  for (let k = 0; k < D.edges.length; k += 2) {
    const value = VALUES[D.edges[k]], reader = NODES[D.edges[k + 1]];
    const from = within(value.source, node), to = within(reader, node);
    if (from !== to) (from ? outgoing : incoming).set(value.type + value.source.id + (from ? "," + reader.id : ""),
      { type: value.type, other: from ? reader : value.source });
  }
  return [[...incoming.values()], [...outgoing.values()]];
}

function facts(node) {
  const rows = [["kind", node.kind], ["runs", node.times > 1 ? node.times + " times" : ""], ["output", node.type],
    ["parameters", node.parameters ? `${si(node.parameters, "")} (${si(node.parameterBytes, "B")})` : ""],
    ["FLOPs", si(node.flops, "FLOP")], ["bytes after fusion", si(node.bytes, "B")],
    ["kept for backward", node.kept ? si(node.kept, "B") : ""],
    ["time at the bound", node.seconds === null ? "" : time(node.seconds)], ["share", percent(share(node))]];
  return rows.filter(row => row[1]);
}

function choose(node, open = true) {
  for (const other of view.querySelectorAll(".chosen")) other.classList.remove("chosen");
  hot.replaceChildren();
  chosen = node;
  $("details").hidden = !node;
  if (!node || !node.element) return;
  node.element.classList.add("chosen");
  const [incoming, outgoing] = connections(node), panel = $("details"), list = element("dl");
  for (const [name, value] of facts(node)) list.append(element("dt", {}, name), element("dd", {}, value));
  const close = element("button", { class: "close", "aria-label": "Close" }, "×");
  close.addEventListener("click", () => choose(null));
  panel.replaceChildren(close, element("h3", {}, node.name + (node.badge ? " " + node.badge : "")),
    element("div", { class: "path soft" }, node.path === node.name ? "" : node.path), list);
  if (node.children.length) {
    const button = element("button", {}, expanded.has(node.id) ? "Collapse" : "Expand");
    button.addEventListener("click", () => toggle(node));
    panel.append(button, element("p", {}));
  }
  const section = (title, rows) => {
    if (!rows.length) return;
    panel.append(element("h3", {}, title), element("ul", {}, ...rows.slice(0, 12),
      ...(rows.length > 12 ? [element("li", { class: "soft" }, `and ${rows.length - 12} more`)] : [])));
  };
  const link = ({ type, other }) => {
    const button = element("button", {}, other.kind === "operation" ? other.name + (other.path ? " in " + other.path : "") : other.path || other.name);
    button.addEventListener("click", () => reveal(other));
    return element("li", {}, element("span", { class: "soft number" }, type + " "), button);
  };
  section("Reads parameters", node.reads.map(name => element("li", {}, name)));
  section("Receives", incoming.map(link));
  section("Is read by", outgoing.map(link));
  const drawn = new Set();
  for (const [rows, to] of [[incoming, true], [outgoing, false]]) {
    for (const { other } of rows) {
      const end = visible(other);
      if (!end || end === node || within(node, end) || drawn.has(end.id + "," + to) || drawn.size > 60) continue;
      drawn.add(end.id + "," + to);
      const [a, b] = to ? [end, node] : [node, end], [ax, ay, aw, ah] = a.at, [bx, by, bw, bh] = b.at;
      const x0 = ax + aw / 2, x1 = bx + bw / 2, down = ay + ah / 2 <= by + bh / 2;
      const y0 = down ? ay + ah : ay, y1 = down ? by : by + bh, bend = Math.max(30, Math.abs(y1 - y0) / 2) * (down ? 1 : -1);
      hot.append(svg("path", { class: "hot", d: `M${x0} ${y0}C${x0} ${y0 + bend} ${x1} ${y1 - bend} ${x1} ${y1}`, opacity: 0.55 }));
    }
  }
}

const tip = $("tip");
function hover(node, x, y) {
  tip.hidden = !node || node === chosen;      // the details show the same
  if (tip.hidden) return;
  tip.replaceChildren(element("b", {}, node.path || node.name), ...facts(node).map(([name, value]) => element("span", {}, `${name}: ${value}`)));
  const [w, h] = [tip.offsetWidth, tip.offsetHeight], area = view.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(x - area.left + 16, area.width - w - 8)) + "px";
  tip.style.top = Math.max(4, y - area.top + 18 + h > area.height ? y - area.top - h - 12 : y - area.top + 18) + "px";
}

function legend() {
  const names = { flops: "FLOPs", bytes: "bytes after fusion", time: "time at the roofline of " + D.chip };
  const amount = value => metric === "flops" ? si(value, "FLOP") : metric === "bytes" ? si(value, "B") : time(value);
  const limits = ["0", ...D.steps.map(limit => (limit * 100).toString())];
  $("legend").replaceChildren(`Share of ${amount(total())} (${names[metric]})`, element("div", { class: "scale" },
    ...limits.map((limit, k) => {
      const color = element("i");
      color.style.background = `var(--c${k})`;
      return element("span", {}, color, limit + " %");
    })));
  for (const button of document.querySelectorAll("[data-metric]")) button.setAttribute("aria-pressed", button.dataset.metric === metric);
}

// What the reader does.

const nodeOf = target => { const found = target.closest && target.closest("[data-id]"); return found ? NODES[found.dataset.id] : null; };
let drag = null;
view.addEventListener("pointerdown", event => { drag = [event.clientX, event.clientY, offset, false]; });
window.addEventListener("pointermove", event => {
  if (drag && event.buttons) {
    const [x, y, from] = drag, [dx, dy] = [event.clientX - x, event.clientY - y];
    if (Math.abs(dx) + Math.abs(dy) > 4) { drag[3] = true; view.classList.add("drag"); }
    if (drag[3]) { offset = [from[0] + dx, from[1] + dy]; move(); hover(null); return; }
  }
  hover(event.target === view || view.contains(event.target) ? nodeOf(event.target) : null, event.clientX, event.clientY);
});
window.addEventListener("pointerup", () => { view.classList.remove("drag"); setTimeout(() => { drag = null; }); });
view.addEventListener("pointerleave", () => hover(null));
view.addEventListener("click", event => {
  if (drag && drag[3]) return;
  const node = nodeOf(event.target);
  if (node && node.children.length) toggle(node);
  choose(node && node.element ? node : null);
  hover(null);
  if (node) { focused = node; focus(node); }
});
view.addEventListener("wheel", event => {
  event.preventDefault();
  const area = view.getBoundingClientRect();
  if (event.ctrlKey || event.metaKey) zoom(Math.exp(-event.deltaY / 200), event.clientX - area.left, event.clientY - area.top);
  else { offset = [offset[0] - (event.shiftKey ? event.deltaY : event.deltaX), offset[1] - (event.shiftKey ? 0 : event.deltaY)]; move(); }
}, { passive: false });
view.addEventListener("focusin", event => { focused = nodeOf(event.target); });

view.addEventListener("keydown", event => {
  const node = focused;
  if (!node || event.ctrlKey || event.altKey || event.metaKey) return;
  const shown = NODES.filter(other => other.element), at = shown.indexOf(node);
  const go = other => { if (other && other.element) { focus(other); if (chosen) choose(other); } };
  const keys = {
    ArrowDown: () => go(shown[at + 1]), ArrowUp: () => go(shown[at - 1]), Home: () => go(shown[0]), End: () => go(shown.at(-1)),
    ArrowRight: () => expanded.has(node.id) ? go(node.children[0]) : (toggle(node, true), go(node)),
    ArrowLeft: () => expanded.has(node.id) ? (toggle(node, false), go(node)) : go(NODES[node.parent]),
    Enter: () => { toggle(node); choose(node); go(node); }, " ": () => { toggle(node); choose(node); go(node); },
    Escape: () => choose(null), "+": () => zoom(1.25), "-": () => zoom(0.8), "0": fitAll,
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
});
document.addEventListener("keydown", event => {
  if (event.key === "/" && event.target.tagName !== "INPUT") { event.preventDefault(); $("search").focus(); }
});

$("metrics").addEventListener("click", event => {
  if (event.target.dataset.metric) { metric = event.target.dataset.metric; legend(); render(); }
});
$("more").addEventListener("click", () => {
  const next = NODES.filter(node => node.element && node.children.length && !expanded.has(node.id));
  if (next.reduce((sum, node) => sum + node.children.length, 0) > 1500) { $("more").textContent = "too many boxes"; return; }
  for (const node of next) expanded.add(node.id);
  render();
});
$("less").addEventListener("click", () => {
  const open = NODES.filter(node => node.element && expanded.has(node.id) && node !== ROOT), depth = Math.max(0, ...open.map(node => node.depth));
  for (const node of open) if (node.depth === depth) expanded.delete(node.id);
  $("more").textContent = "+ level";
  render();
});
$("fit").addEventListener("click", fitAll);
$("in").addEventListener("click", () => zoom(1.25));
$("out").addEventListener("click", () => zoom(0.8));
$("as-table").addEventListener("click", event => {
  const open = $("table").hidden;
  $("table").hidden = !open;
  event.target.setAttribute("aria-pressed", open);
});
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
$("search").addEventListener("input", () => {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), list = $("found");
  const hits = words.length ? NODES.filter(node => node !== ROOT && words.every(word => (node.path + " " + node.name).toLowerCase().includes(word))) : [];
  list.hidden = !words.length;
  list.replaceChildren(...hits.slice(0, 30).map(node => {
    const button = element("button", {}, node.name, " ", element("span", { class: "soft" }, node.path === node.name ? "" : node.path));
    button.addEventListener("click", () => { list.hidden = true; reveal(node); });
    return element("li", {}, button);
  }), ...(hits.length ? [] : [element("li", { class: "soft" }, "nothing has this name")]));
});
$("search").addEventListener("keydown", event => {
  if (event.key === "Escape") { $("search").value = ""; $("found").hidden = true; }
  if (event.key === "Enter" && $("found").querySelector("button")) $("found").querySelector("button").click();
});

legend();
render();
fit();
if (location.hash) {      // graph.html#blocks/attention
  const path = decodeURIComponent(location.hash.slice(1)), found = NODES.find(node => node.path === path && node !== ROOT);
  if (found) reveal(found);
}
