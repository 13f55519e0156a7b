"use strict";
// Where everything is. _place.py and _columns.py have placed all scopes for the case that they are closed; an open one
// pushes apart what is beside and below it.
const D = JSON.parse(document.getElementById("data").textContent), T = D.strings, Z = D.sizes;
const FIELDS = ["parent", "name", "short", "kind", "path", "badge", "times", "type", "line", "w", "h", "flops",
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
for (const [id, [layout, entering, leaving, carried]] of Object.entries(D.groups)) {
  const [xs, lines, layers, tops, routes] = D.layouts[layout];
  const layer = [], besides = xs.map(() => []), children = NODES[id].children.length;
  layers.forEach((items, r) => items.forEach((item, k) => {
    layer[item] = r;
    if (k) besides[lines[item]].push([items[k - 1], item]);
  }));
  GROUPS[id] = { entering, leaving, xs, lines, layers, layer, besides, tops, children,
    edges: routes.map((through, k) => ({ a: through[0], b: through.at(-1), through, values: carried[k] })) };
}
const expanded = new Set(D.expanded);

// A vertical line is where Python's layout has it, or as far right as the boxes left of its own need. A layer is as tall
// as its tallest box, and its boxes are centered in it.
function unfold(made, sizes) {
  const lines = made.lines, at = [...made.xs];
  made.besides.forEach((pairs, n) => {      // from left to right
    for (const [a, b] of pairs) at[n] = Math.max(at[n], at[lines[a]] + (sizes[a][0] + sizes[b][0]) / 2 + Z.across);
  });
  const x = lines.map(n => at[n]), y = [], tops = [], bottoms = [];
  const low = Math.min(...x.map((center, i) => center - sizes[i][0] / 2)), high = Math.max(...x.map((center, i) => center + sizes[i][0] / 2));
  let grown = 0;
  made.layers.forEach((items, r) => {
    const tall = Math.max(0, ...items.map(i => sizes[i][1])), closed = Math.max(0, ...items.map(i => sizes[i][2]));
    tops.push(made.tops[r] + grown);
    bottoms.push(tops[r] + tall);
    for (const i of items) y[i] = tops[r] + (tall - sizes[i][1]) / 2;
    grown += tall - closed;
  });
  return { x: x.map(center => center - low), y, tops, bottoms, width: high - low, height: bottoms.at(-1) };
}

function textOf(values) {
  if (values.length === 1) return values[0] >= 0 ? VALUES[values[0]].type : "several values";
  return values.length + " values";
}

function measure(node) {
  if (!expanded.has(node.id)) { node.size = [node.w, node.h]; return node.size; }
  const made = GROUPS[node.id], sizes = node.children.map(child => [...measure(child), child.h]);
  for (const value of made.entering) sizes.push([Z.port + 5.7 * textOf([value]).length, 0, 0]);
  for (let k = 0; k < made.leaving.length; k++) sizes.push([Z.port, 0, 0]);
  while (sizes.length < made.lines.length) sizes.push([Z.lane, 0, 0]);
  const placed = node.placed = unfold(made, sizes);
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

// The phases of a training step side by side.
function columns(root, paint) {
  const [given, phases, after, upward, lanes, lines] = D.columns, nodes = root.children, at = [];
  const sizes = nodes.map(measure), tall = row => Math.max(0, ...row.map(i => sizes[i][1]));
  const top = Z.pad + tall(given) + Z.down + Z.apart * lanes[0], bottom = top + tall(phases);
  const put = (row, left, level, gap) => row.forEach(i => { at[i] = [left, level]; left += sizes[i][0] + gap; });
  put(phases, Z.pad, top, Z.aisle);
  const low = bottom + Z.down + Z.apart * lanes[1];
  for (const [row, level, phase] of [[given, Z.pad, phases[0]], [after, low, phases.at(-1)]]) {
    const wide = row.reduce((sum, i) => sum + sizes[i][0] + Z.across, -Z.across);
    put(row, Math.max(Z.pad, at[phase][0] + (sizes[phase][0] - wide) / 2), level, Z.across);
  }
  const lane = n => n < 0 ? bottom + 14 + Z.apart * ~n : top - 14 - Z.apart * n;
  for (const [a, b, values, apart, below, [from, to], [column, right]] of lines) {
    const [[x0, y0], [x1, y1]] = [a, b].map((i, k) => {
      const inner = expanded.has(nodes[i].id) && values.length === 1 ? port(nodes[i], values[0], k === 0) : 0;
      return [at[i][0] + sizes[i][0] / 2 + (inner || apart[k]), at[i][1] + (below[k] ? sizes[i][1] : 0)];
    });
    const first = lane(from), last = lane(to), corners = [[x0, y0], [x0, first]];
    const aisle = at[column][0] + sizes[column][0] + right;
    if (first !== last) corners.push([aisle, first], [aisle, last]);
    corners.push([x1, last], [x1, y1]);
    paint.edge(rounded(corners), true, true);
    const before = corners.at(-3)[0];
    paint.label(textOf(values), Math.abs(x1 - before) > 60 ? (before + x1) / 2 : x1, last - 4);
  }
  nodes.forEach((node, i) => draw(node, ...at[i], upward.includes(i), paint));
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
