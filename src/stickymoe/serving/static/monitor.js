// Live curves of runs. The server sends only the points that are new since `cursor`.

const PERIOD = 2000; // milliseconds between two questions
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f"];
const DASHES = ["", "7 4", "2 3", "9 3 2 3"]; // a colour that comes again has another dash
const CHARTS = [
  { title: "Training loss", series: "train.loss", log: true, smooth: true },
  { title: "Validation perplexity", series: "valid.ppl", log: true, dots: true },
  { title: "Switch rate (validation)", series: "valid.switch_rate", dots: true },
  { title: "Switch rate (training)", series: "train.switch_rate", smooth: true },
  { title: "Hit rate, all experts, C = 3 (validation)", series: "valid.cache_hit_rate_all_c3", dots: true },
  { title: "Learning rate", series: "lr" },
  { title: "Gradient norm", series: "train.grad_norm", smooth: true, log: true },
  { title: "Tokens per second", series: "tokens_per_s", smooth: true },
];
const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [480, 220, 52, 22, 30, 20];

const runs = new Map(); // name → { about, series: Map name → [[step, value]], colour, dash, shown }
let cursor = "";
let hovered = null; // a step

const at = (id) => document.getElementById(id);

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function html(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  return made;
}

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  return value.toPrecision(size >= 1000 ? 4 : 3);
}

function duration(seconds) {
  if (seconds === null) return "–";
  const minutes = Math.round(seconds / 60);
  if (minutes < 1) return `${Math.round(seconds)} s`;
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function take(data) {
  cursor = data.cursor;
  at("folder").textContent = `Runs in ${data.folder}`;
  for (const about of data.runs) {
    let run = runs.get(about.name);
    if (!run) {
      const n = runs.size;
      run = { series: new Map(), shown: true, colour: COLOURS[n % COLOURS.length] };
      run.dash = DASHES[Math.floor(n / COLOURS.length) % DASHES.length];
      runs.set(about.name, run);
    }
    if (about.reset) run.series.clear();
    run.about = about;
    for (const [name, points] of Object.entries(about.points)) {
      if (!run.series.has(name)) run.series.set(name, []);
      const known = run.series.get(name);
      // A run that was resumed writes steps again that came after its checkpoint.
      while (known.length && points.length && known.at(-1)[0] >= points[0][0]) known.pop();
      known.push(...points);
    }
  }
  show(data.message ?? "", data.message !== null && runs.size > 0); // runs are gone; without any, it only waits
  for (const part of document.querySelectorAll(".of-runs")) part.hidden = !runs.size;
  drawTable();
  drawCharts();
}

function show(text, isError) {
  at("message").textContent = text;
  at("message").className = isError ? "error" : "";
}

const last = (run, name) => run.series.get(name)?.at(-1)?.[1];

function drawTable() {
  const body = document.querySelector("#runs tbody");
  for (const [name, run] of runs) {
    let row = body.querySelector(`tr[data-run="${CSS.escape(name)}"]`);
    if (!row) {
      row = body.insertRow();
      row.dataset.run = name;
      for (let i = 0; i < 8; i++) row.insertCell().className = i > 3 ? "n" : "";
      const label = html("label");
      const box = html("input");
      Object.assign(box, { type: "checkbox", checked: true });
      box.setAttribute("aria-label", `Show ${name}`);
      box.addEventListener("change", () => { run.shown = box.checked; drawCharts(); });
      const line = element("line", { x1: 0, x2: 26, y1: 5, y2: 5, stroke: run.colour, "stroke-dasharray": run.dash });
      label.append(box, element("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" }, line));
      row.cells[0].append(label);
      const bar = html("progress");
      row.cells[3].append(bar, html("span", "", "hint"));
    }
    const a = run.about;
    row.className = a.status;
    const seed = a.seed === null ? "" : `  seed ${a.seed}`;
    row.cells[1].replaceChildren(html("span", a.label + seed));
    row.cells[1].title = name;
    if (a.message) row.cells[1].append(html("span", a.message, "why"));
    const silent = a.silent_for !== null && a.silent_for > 300;
    row.cells[2].textContent = silent ? `silent for ${duration(a.silent_for)}` : a.status;
    const [bar, text] = row.cells[3].children;
    Object.assign(bar, { max: a.steps || 1, value: a.step });
    bar.setAttribute("aria-label", `Steps of ${name}`);
    text.textContent = ` ${a.step.toLocaleString("en")} / ${(a.steps ?? 0).toLocaleString("en")}`;
    row.cells[4].textContent = duration(a.seconds_left);
    row.cells[5].textContent = number(a.tokens_per_s);
    row.cells[6].textContent = number(last(run, "train.loss"));
    row.cells[7].textContent = number(last(run, "valid.ppl"));
  }
}

/** An exponential average over about 2 % of the points. */
function smoothed(points) {
  const keep = 1 - 1 / Math.max(1, points.length / 50);
  let mean = points[0]?.[1];
  return points.map(([step, value]) => [step, (mean = keep * mean + (1 - keep) * value)]);
}

/** At most about 600 points: the screen shows no more. */
function thinned(points) {
  const every = Math.ceil(points.length / 600);
  return points.filter((_, i) => i % every === 0 || i === points.length - 1);
}

function ticks(low, high, log) {
  if (log) {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
      for (const digit of [1, 2, 5]) all.push(digit * 10 ** power);
    const inside = all.filter((x) => x >= low && x <= high);
    if (inside.length > 1) return inside;
  }
  const raw = (high - low) / 4;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((x) => x * unit >= raw) * unit;
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step / 1e6; x += step) found.push(x);
  return found;
}

/** The labels of an axis, all in one form. */
function labels(values) {
  const most = Math.max(...values.map(Math.abs));
  const short = (v) => Number(v.toPrecision(3));
  if (most < 0.01) return values.map((v) => (short(v) ? short(v).toExponential() : "0"));
  return values.map((v) => short(v).toLocaleString("en", { maximumFractionDigits: 6 }));
}

function drawCharts() {
  for (const chart of CHARTS) {
    const lines = [];
    for (const run of runs.values()) {
      let points = run.shown ? run.series.get(chart.series) ?? [] : [];
      if (chart.smooth && at("smooth").checked) points = smoothed(points);
      if (points.length) lines.push({ run, points: thinned(points) });
    }
    draw(chart, lines);
  }
}

function frame(chart) {
  if (!chart.svg) {
    const card = html("figure", "", "card chart");
    card.style.margin = "0";
    chart.svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    chart.svg.addEventListener("pointermove", (event) => hover(chart, event));
    chart.svg.addEventListener("pointerleave", () => { hovered = null; at("hover").textContent = ""; drawCharts(); });
    card.append(chart.svg);
    card.dataset.series = chart.series;
    chart.card = card;
    at("charts").append(card);
  }
  return chart.svg;
}

function draw(chart, lines) {
  const svg = frame(chart);
  chart.card.hidden = !lines.length;
  if (!lines.length) return;
  const log = chart.log && at("log").checked;
  const values = lines.flatMap((line) => line.points.map((p) => p[1])).filter((v) => !log || v > 0);
  let [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  if (low === high) [low, high] = log ? [low * 0.9, high * 1.1] : [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const most = Math.max(...lines.map((line) => line.points.at(-1)[0]), ...lines.map((line) => line.run.about.steps ?? 0), 1);
  const f = log ? Math.log : (v) => v;
  const x = (step) => LEFT + (step / most) * (WIDTH - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((f(v) - f(low)) / (f(high) - f(low))) * (HEIGHT - TOP - BOTTOM);
  chart.step = (px) => Math.round(((px - LEFT) / (WIDTH - LEFT - RIGHT)) * most);
  chart.lines = lines;
  const now = lines.map((line) => `${line.run.about.label} ${number(line.points.at(-1)[1])}`).join(", ");
  svg.setAttribute("aria-label", `${chart.title}: ${now}`);
  const parts = [element("text", { x: 4, y: 14 }, chart.title)];
  const marks = ticks(low, high, log), names = labels(marks);
  for (const [i, v] of marks.entries()) {
    parts.push(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }));
    parts.push(element("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, names[i]));
  }
  for (const step of ticks(0, most, false))
    parts.push(element("text", { x: x(step), y: HEIGHT - 5, "text-anchor": "middle" }, step.toLocaleString("en")));
  for (const { run, points } of lines) {
    const seen = points.filter((p) => !log || p[1] > 0);
    const d = seen.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    parts.push(element("path", { d, stroke: run.colour, "stroke-dasharray": run.dash }));
    if (chart.dots && seen.length < 40)
      for (const p of seen) parts.push(element("circle", { cx: x(p[0]), cy: y(p[1]), r: 3, fill: run.colour }));
  }
  if (hovered !== null) parts.push(element("line", { class: "cursor", x1: x(hovered), x2: x(hovered), y1: TOP, y2: HEIGHT - BOTTOM }));
  svg.replaceChildren(...parts);
}

function hover(chart, event) {
  const box = chart.svg.getBoundingClientRect();
  const scale = Math.min(box.width / WIDTH, box.height / HEIGHT); // the drawing keeps its shape inside the box
  const px = (event.clientX - box.left - (box.width - WIDTH * scale) / 2) / scale;
  hovered = Math.max(chart.step(px), 0);
  const found = chart.lines.map(({ run, points }) => {
    const near = points.reduce((a, b) => (Math.abs(b[0] - hovered) < Math.abs(a[0] - hovered) ? b : a));
    return `${run.about.label} ${number(near[1])}`;
  });
  at("hover").textContent = `${chart.title}, step ${hovered.toLocaleString("en")}: ${found.join(" · ")}`;
  drawCharts();
}

async function ask() {
  try {
    const answer = await fetch(`/data?since=${encodeURIComponent(cursor)}`);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    take(await answer.json());
  } catch (error) {
    show(`Not connected (${error.message}). The curves are those of the last answer; trying again.`, true);
  }
  setTimeout(ask, document.hidden ? 10 * PERIOD : PERIOD);
}

for (const id of ["log", "smooth"]) at(id).addEventListener("change", drawCharts);
document.addEventListener("visibilitychange", () => { if (!document.hidden) drawCharts(); });
ask();
