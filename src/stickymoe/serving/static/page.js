// The page: runs one prompt on one model or two, and replays the answers.

import * as api from "./api.js";
import { Column } from "./column.js";
import { bytes, number } from "./text.js";

const $ = (id) => document.getElementById(id);
const PLAY_MS = 160;

let models = [];
let columns = [];
let running = null; // the AbortController of the answers under way
let playing = null; // the timer of the replay

function say(text, kind = "") {
  $("message").textContent = text;
  $("message").className = kind;
}

function fail(error) {
  if (error.status === 401) return askForKey();
  say(error.message, "error");
  if (!(error instanceof api.RequestError)) console.error(error);
}

function askForKey() {
  if (api.storedKey()) say("The key is wrong.", "error");
  else say("This server asks for a key.");
  showForms(models.length > 0);
  $("key-form").hidden = false;
  $("key").focus();
}

function showForms(yes) {
  for (const id of ["ask", "legend", "player"]) $(id).hidden = !yes;
}

// --- models and columns ---

async function start() {
  try {
    models = await api.models();
  } catch (error) {
    return fail(error);
  }
  if (!models.length) return say("The server has no model.", "error");
  $("key-form").hidden = true;
  showForms(true);
  $("model").replaceChildren(...models.map((m) => new Option(m.id, m.id)));
  $("compare").replaceChildren(new Option("none", ""), ...models.map((m) => new Option(m.id, m.id)));
  chooseModels();
}

function chooseModels() {
  stop();
  pause();
  const chosen = [$("model").value, $("compare").value].filter(Boolean);
  columns = chosen.map((id, i) => {
    const model = models.find((m) => m.id === id);
    if (columns[i]?.model === model) return columns[i];
    return new Column(model, { onPick: show, onLayer: chooseLayer });
  });
  columns.forEach((column, i) => column.setTag(columns.length > 1 ? "AB"[i] : ""));
  $("columns").replaceChildren(...columns.map((column) => column.root));
  $("columns").classList.toggle("two", columns.length > 1);
  $("in-turn-label").hidden = columns.length < 2;
  document.body.classList.toggle("dense", columns.every((column) => !column.layers));
  fitTokens();
  fillLayers();
  showEnd();
  say("Ready. Settings apply to the next answer.");
}

// A small model may read fewer tokens than the page asks for: then half of them are for the prompt. And a server may
// write fewer.
function fitTokens() {
  const contexts = columns.map((column) => column.info.context).filter(Boolean), least = Math.min(...contexts);
  if (Number($("max-tokens").value) >= least) $("max-tokens").value = Math.max(1, Math.floor(least / 2));
  const most = Math.min(...columns.map((column) => column.info.max_tokens));
  if (Number($("max-tokens").value) > most) $("max-tokens").value = most;
  $("max-tokens").max = most;
}

function fillLayers() {
  const n = Math.max(0, ...columns.map((column) => column.layers)), before = Number($("layer").value || NaN);
  $("layer").replaceChildren(...Array.from({ length: n }, (_, i) => new Option(i, i)));
  $("layer").disabled = n === 0;
  if (n) chooseLayer(before < n ? before : Math.floor(n / 2));
}

function chooseLayer(layer) {
  $("layer").value = layer;
  columns.forEach((column) => column.setLayer(layer));
}

// --- running ---

function options() {
  const seed = $("seed").value;
  return {
    max_tokens: Number($("max-tokens").value), temperature: Number($("temperature").value),
    ...(seed === "" ? {} : { seed: Number(seed) }),
  };
}

async function run() {
  if (running || !columns.length) return;
  const prompt = $("prompt").value;
  if (!prompt.trim()) return say("Write a prompt first.", "error");
  pause();
  running = new AbortController();
  const { signal } = running, shown = columns, cold = $("cold").checked;
  say(shown.length > 1 ? `${shown.map((column) => column.model.id).join(" and ")} answer …` : `${shown[0].model.id} answers …`);
  setRunning(true);
  const answer = (column) => column.run(prompt, options(), cold, signal, showEnd).catch((error) => {
    if (error.name !== "AbortError") fail(error); // at once: the other answer may still run
    throw error;
  });
  try {
    shown.forEach((column) => column.wait());
    if ($("in-turn").checked) for (const column of shown) await answer(column);
    else {
      const results = await Promise.allSettled(shown.map(answer));
      const failed = results.find((result) => result.status === "rejected");
      if (failed) throw failed.reason;
    }
    say(summary(shown));
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
  } finally {
    shown.forEach((column) => column.end());
    running = null;
    setRunning(false);
    showEnd();
  }
}

function setRunning(yes) {
  // Not disabled: a button that is disabled loses the focus.
  $("run").setAttribute("aria-disabled", String(yes));
  if (!yes && document.activeElement === $("stop")) $("run").focus();
  $("stop").disabled = !yes;
  document.body.classList.toggle("running", yes);
  setReplay();
}

const stop = () => running?.abort();

function summary(shown) {
  const [a, b] = shown.map((column) => column.result());
  if (!a) return "";
  if (!b) return a.speed ? `${a.tokens} tokens, ${number(a.speed)} tokens/s.` : `${a.tokens} tokens.`;
  const parts = [];
  if (a.speed && b.speed) parts.push(`B writes ${number(b.speed / a.speed)}× as many tokens per second as A`);
  if (a.bytes && b.bytes) parts.push(`reads ${number(b.bytes / a.bytes)}× the bytes per token`);
  else if (a.bytes && b.bytes === 0) parts.push(`reads nothing (A reads ${bytes(a.bytes)} per token)`);
  else if (b.bytes) parts.push(`reads ${bytes(b.bytes)} per token (A reads nothing)`);
  return parts.length ? `${parts.join(" and ")}.` : "";
}

// --- replay ---

const steps = () => Math.max(0, ...columns.map((column) => column.length));

function showEnd() {
  const n = steps();
  $("step").max = Math.max(n, 1);
  show(n - 1);
}

function show(step) {
  const n = steps(), at = Math.max(0, Math.min(step, n - 1)), scale = Math.max(1, ...columns.map((c) => c.mostMisses));
  columns.forEach((column) => column.show(at, scale));
  $("step").value = at + 1;
  $("position").textContent = n ? `token ${at + 1} of ${n}` : "no answer yet";
  $("step").setAttribute("aria-valuetext", n ? `token ${at + 1} of ${n}: ${columns[0].describe(at)}` : "no answer yet");
  setReplay();
}

const at = () => Number($("step").value) - 1;
const replayable = () => !running && steps() > 0;

function setReplay() {
  const able = replayable(), n = steps();
  $("step").disabled = $("play").disabled = !able;
  $("previous").setAttribute("aria-disabled", String(!able || at() <= 0));
  $("next").setAttribute("aria-disabled", String(!able || at() >= n - 1));
  $("previous").disabled = $("next").disabled = !able;
}

function move(by) {
  if (!replayable()) return;
  pause();
  show(at() + by);
}

function play() {
  if (!replayable()) return;
  if (playing) return pause();
  if (at() >= steps() - 1) show(0);
  playing = setInterval(() => {
    show(at() + 1);
    if (at() >= steps() - 1) pause();
  }, PLAY_MS);
  $("play").setAttribute("aria-label", "Pause");
  $("play").classList.add("playing");
}

function pause() {
  clearInterval(playing);
  playing = null;
  $("play").setAttribute("aria-label", "Play");
  $("play").classList.remove("playing");
}

// --- events ---

$("ask").addEventListener("submit", (event) => { event.preventDefault(); run(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { stop(); pause(); }
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!/^[ -~]*$/.test($("key").value)) return say("The key is wrong: it has only printable ASCII characters.", "error");
  api.storeKey($("key").value);
  if (models.length) { $("key-form").hidden = true; run(); } else start();
});
$("model").addEventListener("change", chooseModels);
$("compare").addEventListener("change", chooseModels);
$("layer").addEventListener("change", () => chooseLayer(Number($("layer").value)));
$("numbers").addEventListener("change", () => document.body.classList.toggle("all-numbers", $("numbers").checked));
$("step").addEventListener("input", () => { pause(); show(at()); });
$("previous").addEventListener("click", () => move(-1));
$("next").addEventListener("click", () => move(1));
$("play").addEventListener("click", play);
document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const inside = event.target.closest?.(".ribbon, .transport");
  if (!by || !inside) return;
  event.preventDefault();
  move(by);
});
document.addEventListener("failure", (event) => fail(event.detail));

start();
