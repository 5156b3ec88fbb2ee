// One answer: its tokens, and the state of slots and counters after each of them.

const COUNTERS = ["seconds", "hits", "misses", "bytes_read", "stall_s"];

export class Answer {
  constructor(model, settings) {
    this.model = model;
    this.settings = settings;
    this.events = [];
    this.texts = [];
    this.totals = [];
    this.trace = null;
    this.cut = null;
    this.resident = null;
  }

  get length() { return this.events.length; }

  add({ text, event, finish }) {
    if (event?.trace) this.trace = event.trace;
    if (event?.cut) this.cut = event.cut;
    if (!finish && event) {
      this.resident ??= event.resident_bytes ?? null;
      this.events.push(event);
      this.texts.push(text);
      this.totals.push(this.#sum(event));
      return true;
    }
    if (text && this.length) this.texts[this.length - 1] += text;
    return false;
  }

  // The prompt's pass writes the first token. It is not part of the totals: they describe decoding.
  #sum(event) {
    if (!this.totals.length) return { passes: 0, seconds: 0, hits: 0, misses: 0, bytes_read: 0, stall_s: 0 };
    const last = this.totals.at(-1), next = { passes: last.passes + 1 };
    for (const name of COUNTERS) next[name] = last[name] + (event[name] ?? 0);
    return next;
  }

  // Adjacent layers may share a pool of experts: how many.
  get layersPerPool() {
    const first = this.events[0];
    return first?.slots?.length ? Math.max(1, Math.round(first.experts.length / first.slots.length)) : 1;
  }

  poolOf(layer) { return Math.floor(layer / this.layersPerPool); }

  // The experts in the slots of each pool after a token.
  slotsAt(step) {
    const slots = (this.events[0]?.slots ?? []).map((pool) => [...pool]);
    for (let i = 1; i <= step; i += 1) this.#apply(slots, this.events[i]);
    return slots;
  }

  #apply(slots, event) {
    for (const [layer, slot, expert] of event.loads ?? []) {
      const pool = slots[this.poolOf(layer)];
      if (pool && slot >= 0) pool[slot] = expert;
    }
  }

  // The experts of a pool that a token used.
  activeIn(pool, step) {
    const n = this.layersPerPool;
    return new Set(this.events[step].experts.slice(pool * n, (pool + 1) * n).flat());
  }

  loadsIn(pool, step) {
    return (this.events[step].loads ?? []).filter(([layer]) => this.poolOf(layer) === pool);
  }

  // The colour of a token, its marks and its description, as seen from one layer.
  seenFrom(layer, step) {
    const event = this.events[step], experts = event.experts?.[layer] ?? [];
    const before = step ? this.events[step - 1].experts?.[layer]?.[0] : undefined;
    const loads = layer < (event.experts?.length ?? 0) ? this.loadsIn(this.poolOf(layer), step) : [];
    return {
      top: experts[0],
      experts: experts.map((expert, i) => [expert, event.weights?.[layer]?.[i]]),
      switched: step > 0 && experts[0] !== before,
      demands: loads.filter((load) => load[4] === "demand").length,
      prefetches: loads.filter((load) => load[4] === "prefetch").length,
    };
  }
}
