"use strict";
// Positions of what is visible: the same as in _place.py and _draw.py.
const D = JSON.parse(document.getElementById("data").textContent), T = D.strings, Z = D.sizes;
const FIELDS = ["parent", "name", "short", "kind", "path", "badge", "times", "type", "line", "w", "h", "flops", "matmul",
  "bytes", "seconds", "parameters", "parameterBytes", "kept", "phase", "reads"];
const NODES = D.nodes.map((row, id) => {
  const node = { id, children: [] };
  FIELDS.forEach((name, i) => { node[name] = row[i]; });
  for (const name of ["name", "short", "kind", "badge", "type", "line", "phase"]) node[name] = T[node[name]];
  node.reads = node.reads.map(i => T[i]);
  return node;
});
for (const node of NODES) {
  const above = NODES[node.parent];
  node.path = node.path >= 0 ? T[node.path] : above && above.path ? above.path + "/" + node.name : node.name;
  node.depth = above ? above.depth + 1 : 0;
  if (above) above.children.push(node);
}
const VALUES = D.values.map(([source, type]) => ({ source: NODES[source], type: T[type] }));
const GROUPS = {};
for (const [id, [entering, leaving, layers, lines, edges, lanes]] of Object.entries(D.groups)) {
  const layer = [];
  layers.forEach((items, r) => items.forEach(i => { layer[i] = r; }));
  const children = NODES[id].children.length, ends = children + entering.length + leaving.length;
  const made = { entering, leaving, layers, lines, layer, children, ends,
    lanes: new Map(lanes.map(([item, ...lane]) => [item, lane])) };
  made.edges = edges.map(([a, b, ...values]) => ({ a, b, values, through: through(made, a, b) }));
  const pieces = new Map();
  for (const { through } of made.edges) {
    for (let k = 1; k < through.length; k++) {
      const a = through[k - 1], b = through[k];
      if (layer[b] === layer[a] + 1) pieces.set(a + "," + b, [a, b]);
    }
  }
  made.pieces = [...pieces.values()];
  GROUPS[id] = made;
}
const expanded = new Set(D.expanded);

function through(made, a, b) {
  const [first, rank, count] = made.lanes.get(a) || [0, 0, 0], items = [a];
  for (let k = 0; k < count && rank + k < made.layer[b]; k++) items.push(first + k);
  return [...items, b];
}

function place(made, sizes) {
  const line = made.lines, count = line.reduce((most, n) => Math.max(most, n + 1), 0);
  const left = Array.from({ length: count }, () => new Map()), right = Array.from({ length: count }, () => new Map());
  for (const items of made.layers) {
    for (let k = 1; k < items.length; k++) {
      const a = items[k - 1], b = items[k];
      const need = Math.max((sizes[a][0] + sizes[b][0]) / 2 + Z.across, left[line[b]].get(line[a]) || 0);
      left[line[b]].set(line[a], need);
      right[line[a]].set(line[b], need);
    }
  }
  const x = new Array(count).fill(0);
  for (let pass = 0, moved = true; pass < count && moved; pass++) {
    moved = false;
    for (let b = 0; b < count; b++) {
      for (const [a, need] of left[b]) if (x[a] + need > x[b] + 1e-6) { x[b] = x[a] + need; moved = true; }
    }
  }
  const near = Array.from({ length: count }, () => []);
  for (const [a, b] of made.pieces) {
    if (line[a] !== line[b]) { near[line[a]].push(line[b]); near[line[b]].push(line[a]); }
  }
  for (let sweep = 0; sweep < 8; sweep++) {
    for (let k = 0; k < count; k++) {
      const n = sweep % 2 ? k : count - 1 - k;
      if (!near[n].length) continue;
      const wanted = near[n].reduce((sum, m) => sum + x[m], 0) / near[n].length;
      let low = -Infinity, high = Infinity;
      for (const [m, need] of left[n]) low = Math.max(low, x[m] + need);
      for (const [m, need] of right[n]) high = Math.min(high, x[m] - need);
      if (low === -Infinity) low = Math.min(wanted, high);
      if (high === Infinity) high = Math.max(wanted, low);
      if (low <= high) x[n] = Math.min(Math.max(wanted, low), high);
    }
  }
  let low = Infinity, high = -Infinity;
  line.forEach((n, i) => { low = Math.min(low, x[n] - sizes[i][0] / 2); high = Math.max(high, x[n] + sizes[i][0] / 2); });
  if (!line.length) low = high = 0;
  const y = [], tops = [], bottoms = [];
  let top = 0;
  for (const items of made.layers) {
    if (items.length && items.every(i => i >= made.children + made.entering.length && i < made.ends)) top -= Z.down - Z.trunk - 6;
    const tall = items.reduce((most, i) => Math.max(most, sizes[i][1]), 0);
    tops.push(top);
    bottoms.push(top + tall);
    for (const i of items) y[i] = top + (tall - sizes[i][1]) / 2;
    top += tall + Z.down;
  }
  return { x: line.map(n => x[n] - low), y, tops, bottoms, width: high - low, height: bottoms.at(-1) || 0 };
}

function textOf(values) {
  if (values.length === 1) return values[0] >= 0 ? VALUES[values[0]].type : "several values";
  return values.length + " values";
}

function measure(node) {
  if (!expanded.has(node.id)) { node.size = [node.w, node.h]; return node.size; }
  const made = GROUPS[node.id], sizes = node.children.map(measure);
  for (const value of made.entering) sizes.push([Z.port + 5.7 * textOf([value]).length, 0]);
  for (let k = 0; k < made.leaving.length; k++) sizes.push([Z.port, 0]);
  while (sizes.length < made.lines.length) sizes.push([Z.lane, 0]);
  const placed = node.placed = place(made, sizes);
  const title = 8 * node.short.length + 7 * node.badge.length + 60;
  node.size = [Math.max(placed.width + 2 * Z.pad, title), placed.height + Z.header + Z.pad];
  return node.size;
}

function port(node, value, leaving) {
  const made = GROUPS[node.id], ports = leaving ? made.leaving : made.entering;
  if (!ports.includes(value) && !ports.includes(-1)) return 0;
  const first = made.children + (leaving ? made.entering.length : 0);
  return node.placed.x[first + Math.max(0, ports.indexOf(value))] - node.placed.width / 2;
}

// Calls paint.frame, paint.box, paint.edge and paint.label for the inside of a scope, from (x, y) on.
function inside(node, x, y, top, bottom, flip, paint) {
  const made = GROUPS[node.id], placed = node.placed, firstOut = made.children + made.entering.length;
  const turn = v => flip ? y + placed.height - v : y + v;
  const isOpen = i => i < made.children && expanded.has(node.children[i].id);
  const labels = new Map();
  const end = (i, value, leaving) => {
    const at = x + placed.x[i];
    if (i >= made.children) return [at, turn(placed.y[i])];
    const child = node.children[i];
    return [isOpen(i) ? at + port(child, value, leaving) : at, turn(placed.y[i] + (leaving ? child.size[1] : 0))];
  };
  for (const { a, b, values, through } of made.edges) {
    const open = isOpen(a) || isOpen(b);
    for (const value of open ? values : values.slice(0, 1)) {
      const [x0, y0] = end(a, value, true), [x1, y1] = end(b, value, false);
      let bx = x0, by = turn(placed.bottoms[made.layer[a]] + Z.trunk), path = `M${x0} ${y0}L${bx} ${by}`;
      for (const i of through.slice(1)) {
        const at = i === b ? x1 : x + placed.x[i], level = turn(placed.tops[made.layer[i]]), middle = (by + level) / 2;
        path += `C${bx} ${middle} ${at} ${middle} ${at} ${level}`;
        bx = at;
        by = turn(placed.bottoms[made.layer[i]]);
        const final = i === b ? y1 : by;
        if (Math.abs(final - level) > 0.1) path += `L${at} ${final}`;
      }
      paint.edge(path, b < made.children, false);
      if ((a >= made.children && a < firstOut) || (a < made.children && !isOpen(a) && node.children[a].kind !== "input")) {
        const key = a + "," + Math.round(x0);
        if (!labels.has(key)) labels.set(key, [x0, y0 + (flip ? -8 : 15), new Set()]);
        for (const v of open ? [value] : values) labels.get(key)[2].add(v);
      }
    }
  }
  if (node.parent >= 0) {
    for (let i = made.children; i < firstOut + made.leaving.length; i++) {
      const at = x + placed.x[i], outer = (i < firstOut) !== flip ? top : bottom;
      paint.edge(`M${at} ${outer}L${at} ${turn(placed.y[i])}`, false, false);
    }
  }
  node.children.forEach((child, i) => {
    draw(child, x + placed.x[i] - child.size[0] / 2, turn(placed.y[i] + (flip ? child.size[1] : 0)), flip, paint);
  });
  for (const [at, level, values] of labels.values()) paint.label(textOf([...values]), at, level);
}

function draw(node, x, y, flip, paint) {
  const [w, h] = node.size;
  node.at = [x, y, w, h];
  if (!expanded.has(node.id)) { paint.box(node, x, y, w, h); return; }
  paint.frame(node, x, y, w, h);
  inside(node, x + (w - node.placed.width) / 2, y + Z.header, y, y + h, flip, paint);
}

// The phases of a training step side by side: forward down, backward up, update down.
function columns(root, paint) {
  const made = GROUPS[root.id], nodes = root.children, phase = [], given = [], after = [];
  nodes.forEach((child, i) => { if (child.kind === "phase") phase.push(i); });
  nodes.forEach((child, i) => {
    if (child.kind !== "phase") (made.layer[i] < made.layer[phase[0]] ? given : after).push(i);
  });
  nodes.forEach(measure);
  const backward = new Set(phase.filter(i => nodes[i].name.startsWith("backward"))), lines = made.edges;
  const upper = (i, leaving) => given.includes(i) || (phase.includes(i) && leaving === backward.has(i));
  const lanes = [0, 0], lane = lines.map(({ a, b }) => {      // each line has a lane of its own above or below the phases
    const ends = [upper(a, true), upper(b, false)];
    const mine = [ends.includes(true) ? lanes[0]++ : 0, ends.includes(false) ? lanes[1]++ : 0];
    return ends.map(top => top ? mine[0] : mine[1]);
  });
  const head = Math.max(0, ...given.map(i => nodes[i].size[1])), high = Math.max(...phase.map(i => nodes[i].size[1]));
  const y = Z.pad + head + Z.down + Z.apart * lanes[0];
  const at = {};
  let left = Z.pad;
  for (const i of phase) { at[i] = [left, y, ...nodes[i].size]; left += nodes[i].size[0] + Z.aisle; }
  const bottom = y + high + Z.down + Z.apart * lanes[1];
  for (const [group, level, below] of [[given, Z.pad, phase[0]], [after, bottom, phase.at(-1)]]) {
    const total = group.reduce((sum, i) => sum + nodes[i].size[0] + Z.across, -Z.across);
    let x = Math.max(Z.pad, at[below][0] + (at[below][2] - total) / 2);
    for (const i of group) { at[i] = [x, level, ...nodes[i].size]; x += nodes[i].size[0] + Z.across; }
  }
  const used = new Map();
  lines.forEach(({ a, b, values }, n) => {
    const [[x0, y0, lane0], [x1, y1, last]] = [[a, true], [b, false]].map(([i, leaving], end) => {
      const [x, top, wide, tall] = at[i], key = i + "," + leaving, k = (used.get(key) || 0) + 1;
      used.set(key, k);
      const low = leaving !== backward.has(i);
      const apart = expanded.has(nodes[i].id) && values.length === 1 ? port(nodes[i], values[0], leaving) : 0;
      return [x + wide / 2 + (apart || (k % 2 ? Math.floor(k / 2) : -k / 2) * 14), low ? top + tall : top,
        upper(i, leaving) ? y - 14 - Z.apart * lane[n][end] : y + high + 14 + Z.apart * lane[n][end]];
    });
    const corners = [[x0, y0], [x0, lane0]];
    if (lane0 !== last) {
      let column = phase[0];
      for (const i of phase) if (at[i][0] <= x0) column = i;
      const aisle = at[column][0] + at[column][2] + Z.aisle / 2 - 7 * (n % 5) + 14;
      corners.push([aisle, lane0], [aisle, last]);
    }
    corners.push([x1, last], [x1, y1]);
    paint.edge(rounded(corners), true, true);
    const before = corners.at(-3)[0];
    paint.label(textOf(values), Math.abs(x1 - before) > 60 ? (before + x1) / 2 : x1, last - 4);
  });
  for (const [i, [x, top]] of Object.entries(at)) draw(nodes[i], x, top, backward.has(+i), paint);
}

function rounded(corners) {
  let path = `M${corners[0].join(" ")}`;
  for (let k = 1; k + 1 < corners.length; k++) {
    const [px, py] = corners[k - 1], [x, y] = corners[k], [nx, ny] = corners[k + 1];
    const a = Math.abs(px - x) + Math.abs(py - y), b = Math.abs(nx - x) + Math.abs(ny - y), r = Math.min(9, a / 2, b / 2);
    if (r < 0.5) continue;
    path += `L${x + (px - x) / a * r} ${y + (py - y) / a * r}Q${x} ${y} ${x + (nx - x) / b * r} ${y + (ny - y) / b * r}`;
  }
  return path + `L${corners.at(-1).join(" ")}`;
}
