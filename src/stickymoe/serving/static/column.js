// One model on the page: its settings, meters, ribbon and slots.

import * as api from "./api.js";
import { Answer } from "./answer.js";
import { bytes, number, percent, plural, seconds } from "./text.js";

const COLOURS = 8, PATTERNS = 4;
const THROTTLES = [null, 1e9, 200e6, 50e6, 10e6, 1e6, 100e3];
const CALM = matchMedia("(prefers-reduced-motion: reduce)");

// The classes of an expert: its colour, and from the ninth expert on a pattern.
const colourOf = (expert) => `c${expert % COLOURS} p${Math.floor(expert / COLOURS) % PATTERNS}`;

function element(tag, className, text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A number with its unit in small letters.
function setMeter(node, text, title = "") {
  if (node.dataset.text === text && node.title === title) return;
  const [value, ...unit] = text.split(" ");
  node.replaceChildren(value, ...(unit.length ? [" ", element("small", "", unit.join(" "))] : []));
  node.dataset.text = text;
  node.title = title;
}

export class Column {
  #ribbon; #pools; #rows = []; #spans = []; #frame = 0; #step = 0; #scale = 1; #layer = 0; #flashed = -1;

  constructor(model, { onPick, onLayer }) {
    this.model = model;
    this.info = model.stickymoe;
    this.layers = this.info.experts ? this.info.layers : 0;
    this.answer = null;
    this.onLayer = onLayer;
    this.root = document.getElementById("column").content.firstElementChild.cloneNode(true);
    this.$ = (name) => this.root.querySelector(`.${name}`);
    this.#ribbon = this.$("ribbon");
    this.#pools = this.$("pools");
    this.root.classList.toggle("dense", !this.layers);
    this.$("name").textContent = model.id;
    this.$("facts").textContent = this.#facts();
    this.#ribbon.addEventListener("click", (event) => {
      const index = this.#spans.indexOf(event.target.closest(".token"));
      if (index >= 0 && !document.body.classList.contains("running")) onPick(index);
    });
    this.$("save").addEventListener("click", (event) => this.#save(event));
    this.#fillSettings();
    this.#clear();
  }

  get length() { return this.answer?.length ?? 0; }
  get mostMisses() { return Math.max(0, ...(this.answer?.events ?? []).slice(1).map((event) => event.misses)); }

  #facts() {
    const { layers, experts, top_k, expert_bytes } = this.info;
    return this.layers ? `${layers} layers, ${experts} experts of ${bytes(expert_bytes)}, top ${top_k}` : "no experts";
  }

  setTag(tag) {
    this.tag = tag;
    setText(this.$("tag"), tag);
    const name = [tag, this.model.id].filter(Boolean).join(" ");
    this.root.setAttribute("aria-label", name);
    this.#ribbon.setAttribute("aria-label", `Answer of ${name}. The arrow keys move from token to token.`);
    this.#pools.setAttribute("aria-label", `Slots of ${name}`);
  }

  // --- settings ---

  #fillSettings() {
    const { info } = this, controls = this.$("settings");
    controls.hidden = !this.layers;
    if (!this.layers) return;
    const slots = this.$("slots");
    slots.max = info.max_slots;
    slots.value = info.slots;
    this.$("policy").replaceChildren(...info.policies.map((name) => new Option(name, name)));
    this.$("policy").value = info.policy;
    this.$("prefetch").replaceChildren(...info.prefetches.map((name) => new Option(name.replaceAll("_", " "), name)));
    this.$("prefetch").value = info.prefetch;
    // The server refuses less than one expert per second.
    const usual = THROTTLES.filter((rate) => rate === null || rate >= info.expert_bytes);
    const rates = [...new Set([...usual, info.throttle])].sort((a, b) => (b ?? Infinity) - (a ?? Infinity));
    const name = (rate) => (rate === null ? "off" : `${bytes(rate).replace(/\.0+ /, " ")}/s`);
    this.$("throttle").replaceChildren(...rates.map((rate) => new Option(name(rate), JSON.stringify(rate))));
    this.$("throttle").value = JSON.stringify(info.throttle);
    controls.addEventListener("input", () => this.#settingsChanged());
    this.#settingsChanged();
  }

  #settings() {
    if (!this.layers) return {};
    return {
      slots: Number(this.$("slots").value), policy: this.$("policy").value, prefetch: this.$("prefetch").value,
      throttle: JSON.parse(this.$("throttle").value),
    };
  }

  #settingsChanged() {
    const { slots } = this.#settings(), pools = this.info.pools ?? this.layers;
    setText(this.$("slots-shown"), `${slots} of ${this.info.experts}`);
    const changed = this.length && JSON.stringify(this.answer.settings) !== JSON.stringify(this.#settings());
    this.$("pending").hidden = !changed;
    if (!this.length) this.#buildSlots(Array.from({ length: pools }, () => Array(slots).fill(null)), this.layers / pools);
  }

  // --- one answer ---

  #clear() {
    this.#spans = [];
    this.#flashed = -1;
    const hint = this.layers
      ? "The answer appears here. The colour of a token shows its top expert in the chosen layer."
      : "The answer appears here. This model has no experts, so its tokens have no colour.";
    this.#ribbon.replaceChildren(element("span", "hint", hint));
    setText(this.$("detail"), "");
    if (this.layers) return;
    this.#pools.hidden = true;
    this.$("spark").hidden = true;
  }

  wait() {
    this.answer = new Answer(this.model, this.#settings());
    this.#clear();
    if (this.layers) this.#settingsChanged();
    this.$("save").hidden = true;
    this.#state("waiting");
  }

  async run(prompt, options, cold, signal, onToken) {
    const stickymoe = { ...this.answer.settings, routes: true, ...(this.layers ? { cold } : {}) };
    try {
      for await (const chunk of api.complete(this.model, prompt, { ...options, stickymoe }, signal)) {
        if (!this.answer.add(chunk)) continue;
        if (this.length === 1) {
          this.#state("running");
          if (this.layers) this.#buildSlots(this.answer.slotsAt(0), this.answer.layersPerPool);
        }
        onToken();
      }
      this.#state(this.answer.cut ? `done: ${this.answer.cut}` : "done");
    } catch (error) {
      this.#state(error.name === "AbortError" ? "stopped" : "failed");
      throw error;
    }
  }

  // Draw at once what waits for the next frame.
  end() {
    if (["waiting", "running"].includes(this.root.dataset.state)) this.#state("stopped");
    this.$("save").hidden = !this.answer?.trace;
    if (this.answer?.trace) this.$("save").href = this.answer.trace;
    this.#draw();
  }

  #state(name) {
    this.root.dataset.state = name;
    setText(this.$("state"), name);
  }

  // Decoding of the whole answer: what the summary compares.
  result() {
    const total = this.answer?.totals.at(-1);
    if (!total) return null;
    const { passes } = total;
    return { tokens: this.length, speed: passes && total.seconds ? passes / total.seconds : null, bytes: passes ? total.bytes_read / passes : null };
  }

  async #save(event) {
    event.preventDefault();
    const path = this.answer.trace;
    try {
      const url = URL.createObjectURL(await api.trace(path));
      const link = Object.assign(document.createElement("a"), { href: url, download: `${path.split("/").at(-1)}.zip` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    } catch (error) {
      document.dispatchEvent(new CustomEvent("failure", { detail: error }));
    }
  }

  // --- drawing ---

  setLayer(layer) {
    this.#layer = Math.min(layer, Math.max(this.layers - 1, 0));
    this.#spans.forEach((span, i) => this.#colour(span, i));
    this.#markRow();
    this.#draw();
  }

  show(step, scale) {
    this.#step = Math.min(step, this.length - 1);
    this.#scale = scale;
    if (!this.#frame) this.#frame = requestAnimationFrame(() => this.#draw());
  }

  describe(step) {
    if (step < 0 || step >= this.length) return "";
    const event = this.answer.events[step], parts = [];
    if (this.layers) {
      const seen = this.answer.seenFrom(this.#layer, step);
      const named = seen.experts.map(([expert, w]) => (w === undefined ? `${expert}` : `${expert} (${w.toFixed(2)})`));
      const experts = named.length > 4 ? [...named.slice(0, 3), `${named.length - 3} more`] : named;
      const noun = experts.length === 1 ? "expert" : "experts";
      parts.push(experts.length ? `${noun} ${experts.join(", ")} in layer ${this.#layer}` : `no expert in layer ${this.#layer}`);
      parts.push(`${plural(event.misses, "miss", "misses")} in all layers, ${bytes(event.bytes_read)} read`);
    }
    const stall = event.stall_s > 0 ? `, ${seconds(event.stall_s)} of it stall` : "";
    parts.push(`${seconds(event.seconds)}${stall}`);
    return `${event.prompt ? "prompt and first token" : "token"} “${event.text.replaceAll("\n", "⏎")}”: ${parts.join("; ")}`;
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    if (!this.length) return this.#drawMeters(null);
    this.#step = Math.max(0, Math.min(this.#step, this.length - 1));
    this.#drawRibbon();
    this.#drawMeters(this.answer.totals[this.#step]);
    if (this.layers) {
      this.#drawSlots();
      this.#drawSpark();
    }
    setText(this.$("detail"), this.describe(this.#step));
  }

  #drawRibbon() {
    if (!this.#spans.length) this.#ribbon.replaceChildren();
    const atEnd = this.#ribbon.scrollTop + this.#ribbon.clientHeight > this.#ribbon.scrollHeight - 40;
    const before = this.#spans.length;
    for (let i = before; i < this.length; i += 1) {
      const span = element("span", "token");
      this.#spans.push(span);
      this.#colour(span, i);
      this.#ribbon.append(span);
    }
    this.#spans.forEach((span, i) => {
      if (i >= before - 1) setText(span, this.answer.texts[i]);
      span.classList.toggle("now", i === this.#step);
      span.classList.toggle("later", i > this.#step);
    });
    if (before < this.length) {
      if (atEnd) this.#ribbon.scrollTop = this.#ribbon.scrollHeight;
    } else this.#intoView(this.#ribbon, this.#spans[this.#step]);
  }

  #intoView(box, node) {
    const inner = node.getBoundingClientRect(), outer = box.getBoundingClientRect();
    if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 12;
    else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 12;
  }

  #colour(span, i) {
    const marks = span.className.match(/\b(now|later)\b/g) ?? [];
    if (!this.layers) return;
    const seen = this.answer.seenFrom(this.#layer, i), classes = ["token", ...marks];
    if (seen.top !== undefined) classes.push(colourOf(seen.top));
    if (i === 0) classes.push("first");
    if (seen.switched) classes.push("switch");
    if (seen.demands) classes.push("load");
    else if (seen.prefetches) classes.push("prefetch");
    span.className = classes.join(" ");
    span.dataset.expert = seen.top ?? "–";
    const loads = [
      ...(seen.demands ? [`${plural(seen.demands, "load")} on demand`] : []),
      ...(seen.prefetches ? [plural(seen.prefetches, "prefetch", "prefetches")] : []),
    ];
    span.title = [`expert ${seen.top ?? "none"}`, ...loads].join(", ");
  }

  #drawMeters(total) {
    const n = total?.passes ?? 0, asked = n ? total.hits + total.misses : 0;
    setMeter(this.$("m-speed"), n && total.seconds ? number(n / total.seconds) : "–", n ? `${plural(n, "token")} in ${seconds(total.seconds)} of forward passes, without the prompt` : "");
    setMeter(this.$("m-hits"), asked ? percent(total.hits / asked) : "–", asked ? `${total.hits} of ${asked} requests for an expert, without the prompt` : "");
    setMeter(this.$("m-bytes"), n && this.layers ? bytes(total.bytes_read / n) : "–", n ? `${bytes(total.bytes_read)} in ${plural(n, "token")}, without the prompt` : "");
    setMeter(this.$("m-stall"), n && total.seconds ? percent(Math.min(1, total.stall_s / total.seconds)) : "–", n ? `${seconds(total.stall_s)} of ${seconds(total.seconds)} waiting for experts` : "");
    const resident = this.answer?.resident ?? this.info.resident_bytes;
    setMeter(this.$("m-memory"), resident ? bytes(resident) : "–", resident ? "weights in memory" : "");
  }

  #drawSpark() {
    const plot = this.$("spark-plot"), events = this.answer.events.slice(1), n = Math.max(events.length, 32);
    const scale = this.#scale, bar = (i) => `M${i + 0.1} ${scale}V${scale - events[i].misses}h.8V${scale}z`;
    plot.setAttribute("viewBox", `0 0 ${n} ${scale}`);
    plot.querySelector(".bars").setAttribute("d", events.map((_, i) => bar(i)).join(""));
    const now = this.#step - 1;
    plot.querySelector(".bar-now").setAttribute("d", now >= 0 ? `M${now} ${scale}V0h1V${scale}z` : "");
    const misses = events.reduce((sum, event) => sum + event.misses, 0);
    plot.setAttribute("aria-label", `Misses per token: ${misses} in ${plural(events.length, "token")}, at most ${this.mostMisses}`);
    setText(this.$("spark-top"), `max ${this.mostMisses}`);
  }

  // --- slots ---

  #buildSlots(slots, layersPerPool) {
    this.#flashed = -1;
    this.root.classList.toggle("many-slots", (slots[0]?.length ?? 0) > 8);
    this.root.classList.toggle("many-layers", slots.length > 8);
    this.#rows = slots.map((pool, p) => {
      const first = p * layersPerPool, last = first + layersPerPool - 1;
      const row = element("div", "pool"), name = element("button", "pool-name", first === last ? `${first}` : `${first}–${last}`);
      name.type = "button";
      name.setAttribute("aria-label", first === last ? `Layer ${first}` : `Layers ${first} to ${last}`);
      name.addEventListener("click", () => this.onLayer(first));
      const boxes = pool.map(() => element("span", "slot empty"));
      const holder = element("div", "slots-of-pool"), passed = element("span", "passed");
      holder.append(...boxes, passed);
      row.append(name, holder);
      return { row, name, boxes, passed, layersPerPool };
    });
    const head = element("div", "pools-head hint", `${layersPerPool > 1 ? "Layers" : "Layer"} and slots`);
    this.#pools.replaceChildren(head, ...this.#rows.map(({ row }) => row));
    this.#markRow();
  }

  #markRow() {
    this.#rows.forEach(({ row, name, layersPerPool }, p) => {
      const chosen = Math.floor(this.#layer / layersPerPool) === p;
      row.classList.toggle("chosen", chosen);
      name.setAttribute("aria-pressed", String(chosen));
      if (chosen && this.#pools.isConnected) this.#intoView(this.#pools, row);
    });
  }

  #drawSlots() {
    const step = this.#step, slots = this.answer.slotsAt(step), flash = step !== this.#flashed && !CALM.matches;
    this.#flashed = step;
    this.#rows.forEach(({ boxes, passed }, p) => {
      const active = this.answer.activeIn(p, step), kinds = new Map(), through = [];
      for (const [, slot, expert, , kind] of this.answer.loadsIn(p, step)) {
        if (slot < 0) through.push(expert);
        else kinds.set(slot, kind);
      }
      boxes.forEach((box, s) => {
        const expert = slots[p][s] ?? null, kind = kinds.get(s);
        const classes = ["slot", expert === null ? "empty" : colourOf(expert)];
        if (active.has(expert)) classes.push("active");
        if (kind) classes.push(kind === "prefetch" ? "prefetch" : "load");
        const className = classes.join(" ");
        if (box.className !== className) box.className = className;
        setText(box, expert === null ? "" : `${expert}`);
        const title = expert === null ? "empty" : `expert ${expert}${active.has(expert) ? ", active" : ""}${kind ? `, loaded (${kind})` : ""}`;
        if (box.title !== title) box.title = title;
        if (kind && flash) box.animate([{ transform: "scale(1.18)", filter: "brightness(1.35)" }, { transform: "none", filter: "none" }], { duration: 320, easing: "ease-out" });
      });
      setText(passed, through.length ? `+ ${[...new Set(through)].join(", ")}` : "");
      passed.title = through.length ? "read without a slot, for this token only" : "";
    });
  }
}
