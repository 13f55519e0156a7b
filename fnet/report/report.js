// The page of a report: which runs are shown, smoothing, scale, and what is under the pointer.
const D = JSON.parse(document.getElementById("data").textContent), $ = id => document.getElementById(id);
const shown = D.runs.map(() => true), state = { log: false, weight: 0, bands: true };
const groups = new Map();
D.runs.forEach((run, i) => groups.set(run.group, [...(groups.get(run.group) || []), i]));
const hasBands = [...groups.values()].some(members => members.length > 1);
const splits = [...new Set(D.charts.flatMap(chart => chart.series.map(series => series.split)))].filter(Boolean).sort(
  (a, b) => (a === "train") - (b === "train") || (a < b ? -1 : 1));

function curvesOf(chart) {
  const several = D.runs.length > 1, made = [], done = new Set();
  for (const series of chart.series) {
    if (!shown[series.run]) continue;
    const split = Math.max(0, splits.indexOf(series.split)), base = { color: several ? series.run : split, dash: several ? split : 0 };
    const members = groups.get(D.runs[series.run].group).filter(i => shown[i]);
    const smoothed = each => ({ steps: each.steps, values: smooth(each.values, state.weight) });
    if (state.bands && members.length > 1) {
      const key = D.runs[series.run].group + "/" + series.split;
      if (done.has(key)) continue;
      done.add(key);
      const same = chart.series.filter(other => members.includes(other.run) && other.split === series.split);
      made.push({ ...base, ...band(same.map(smoothed)), color: members[0],
        name: `${series.split ? series.split + ", " : ""}${same.length} seeds of ${D.runs[members[0]].name}` });
    } else {
      made.push({ ...base, ...smoothed(series), raw: state.weight ? series.values : null,
        name: [series.split, several ? D.runs[series.run].name : ""].filter(Boolean).join(", ") || chart.title });
    }
  }
  return made;
}

const figures = [...document.querySelectorAll("[data-chart]")].map(figure => {
  const chart = D.charts[figure.dataset.chart], holder = figure.querySelector(".plot"), keys = element("div", { class: "keys" });
  figure.append(keys);
  const item = { chart, holder, keys, made: null, at: 0 };
  const tell = (x, y) => {
    if (!item.made) return;
    const { step, rows } = item.made.near(x), tip = $("tip");
    tip.replaceChildren(element("b", {}, "step " + step.toLocaleString("en")), ...rows.map(([curve, value, range]) => {
      const dot = element("i", { class: "dot" });
      dot.style.setProperty("--color", `var(--p${curve.color % 8})`);
      return element("div", {}, element("span", {}, dot, curve.name), element("span", {}, number(value) + (range ? ` (${number(range[0])} to ${number(range[1])})` : "")));
    }));
    tip.hidden = false;
    tip.style.left = Math.max(4, x + 18 + tip.offsetWidth > innerWidth ? x - tip.offsetWidth - 14 : x + 18) + "px";
    tip.style.top = Math.max(4, Math.min(y + 14, innerHeight - tip.offsetHeight - 8)) + "px";
  };
  const leave = () => { $("tip").hidden = true; if (item.made) item.made.leave(); };
  holder.addEventListener("pointermove", event => tell(event.clientX, event.clientY));
  holder.addEventListener("pointerleave", leave);
  holder.addEventListener("blur", leave);
  holder.addEventListener("keydown", event => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!way || !item.made) return;
    event.preventDefault();
    item.at = Math.min(Math.max(item.at + way * (event.shiftKey ? 10 : 1), 0), item.made.steps.length - 1);
    tell(item.made.toClient(item.made.steps[item.at]), holder.getBoundingClientRect().top + 20);
  });
  return item;
});

function draw(item) {
  const curves = curvesOf(item.chart);
  item.made = plot(item.holder, curves, { log: state.log && item.chart.section === "curves", zero: item.chart.zero });
  const plain = curves.length > 12 || (curves.length === 1 && curves[0].name === item.chart.title);
  item.keys.replaceChildren(...(plain ? [] : curves).map(curve => {
    const line = svg("line", { x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": 2.4, "stroke-dasharray": DASHES[curve.dash % DASHES.length] });
    line.style.stroke = `var(--p${curve.color % 8})`;
    return element("span", {}, svg("svg", {}, line), curve.name);
  }));
}
const drawAll = () => figures.forEach(draw);

if (D.runs.length > 1 && $("runs")) {
  $("runs").append(...D.runs.map((run, i) => {
    const button = element("button", { "aria-pressed": "true", class: "p" + i % 8 }, element("i", { class: "dot" }), run.name);
    button.addEventListener("click", () => { shown[i] = !shown[i]; button.setAttribute("aria-pressed", shown[i]); drawAll(); });
    return button;
  }));
}
if ($("smoothing")) {
  const scale = () => document.querySelectorAll("[data-scale]").forEach(button => button.setAttribute("aria-pressed", (button.dataset.scale === "log") === state.log));
  $("smoothing").addEventListener("input", event => { state.weight = +event.target.value; $("smoothed").textContent = event.target.value; drawAll(); });
  document.querySelectorAll("[data-scale]").forEach(button => button.addEventListener("click", () => { state.log = button.dataset.scale === "log"; scale(); drawAll(); }));
  $("bands-label").hidden = !hasBands;
  $("bands").addEventListener("change", event => { state.bands = event.target.checked; drawAll(); });
  scale();
}
$("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
addEventListener("resize", drawAll);
addEventListener("beforeprint", drawAll);
drawAll();
