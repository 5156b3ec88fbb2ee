"use strict";

function draw(node) {
  const spec = JSON.parse(document.querySelector(`script.spec[data-for="${node.id}"]`).textContent);
  const actions = { export: true, source: false, compiled: false, editor: false };
  vegaEmbed(node, spec, { renderer: "svg", actions, downloadFileName: node.id }).then(() => { node.dataset.drawn = "yes"; });
}
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
}, { rootMargin: "800px" });
document.querySelectorAll(".chart").forEach((node) => seen.observe(node));

function fill(box, counts, run, layer, data) {
  const experts = run.experts[layer], loads = run.loads[layer];
  let switches = 0, fetched = 0;
  box.replaceChildren(...data.tokens.map((token, i) => {
    const span = document.createElement("span");
    span.textContent = token === "" ? "·" : token.replaceAll("\n", "⏎");
    span.style.backgroundColor = PALETTE[experts[i] % PALETTE.length] + "73";
    span.title = `expert ${experts[i]}` + (loads[i] ? `, ${loads[i]} loaded` : "");
    if (data.experts > PALETTE.length) {
      const number = document.createElement("sub");
      number.textContent = experts[i];
      span.append(number);
    }
    if (i && experts[i] !== experts[i - 1]) { span.classList.add("switch"); switches += 1; }
    if (loads[i]) { span.classList.add("miss"); fetched += loads[i]; }
    return span;
  }));
  counts.textContent = `${run.label}: the top-1 expert of layer ${layer} changes ${switches} times in ${experts.length - 1} ` +
    `steps; ${fetched} experts are loaded into ${data.capacity} slots.`;
}

document.querySelectorAll(".ribbons").forEach((part) => {
  const data = JSON.parse(document.getElementById(part.dataset.source).textContent);
  const find = (name) => part.querySelector(name);
  const layers = find(".layer");
  for (const name of [".upper", ".lower"]) data.runs.forEach((run, i) => find(name).add(new Option(run.label, i)));
  find(".lower").value = data.sticky;
  for (let layer = 0; layer < data.layers; layer += 1) {
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, { type: "radio", name: part.dataset.source, value: layer, checked: layer === data.layer });
    label.append(input, ` ${layer}`);
    layers.append(label);
  }
  const key = find(".key");
  for (let expert = 0; expert < data.experts; expert += 1) {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.backgroundColor = PALETTE[expert % PALETTE.length] + "73";
    item.append(swatch, `expert ${expert}`);
    key.append(item);
  }
  const marks = document.createElement("span");
  marks.textContent = "▏ the top-1 expert changes   ▁ the cache loads an expert";
  key.append(marks);
  const show = () => {
    const layer = Number(part.querySelector(".layer input:checked").value);
    fill(find(".upper-text"), find(".upper-counts"), data.runs[find(".upper").value], layer, data);
    fill(find(".lower-text"), find(".lower-counts"), data.runs[find(".lower").value], layer, data);
  };
  part.addEventListener("change", show);
  part.querySelectorAll(".ribbon").forEach((box) => box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    const spans = [...box.children], at = spans.findIndex((span) => span.classList.contains("here"));
    const next = spans[Math.min(Math.max(at + move, 0), spans.length - 1)];
    part.querySelectorAll(".here").forEach((span) => span.classList.remove("here"));
    next.classList.add("here");
    find(".here-counts").textContent = `“${next.textContent.trim()}”: ${next.title}`;
  }));
  show();
});
