// The chat page: streams answers of /v1/chat/completions and draws what /v1/loads says.
"use strict";

const element = (id) => document.getElementById(id);
const points = 120;  // one a second
const history = { throughput: [], running: [], waiting: [], used: [], kept: [] };
let conversation = [];
let running = null;  // AbortController of the answer that comes in

element("key").value = sessionStorage.getItem("key") || "";
element("key").addEventListener("change", () => sessionStorage.setItem("key", element("key").value));

function headers() {
  const key = element("key").value;
  return key ? { "Content-Type": "application/json", Authorization: "Bearer " + key }
             : { "Content-Type": "application/json" };
}

function addMessage(role) {
  const box = document.createElement("div");
  box.className = "message " + role;
  const reasoning = document.createElement("div");
  reasoning.className = "reasoning";
  const text = document.createElement("div");
  text.className = "text";
  const note = document.createElement("div");
  note.className = "note";
  box.append(reasoning, text, note);
  element("messages").append(box);
  box.scrollIntoView({ block: "end" });
  return { box, reasoning, text, note };
}

// Calls onEvent with the parsed JSON of every event of a response.
async function readEvents(response, onEvent) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
      const event = buffer.slice(0, end);
      buffer = buffer.slice(end + 2);
      if (event.startsWith("data: ") && event !== "data: [DONE]") onEvent(JSON.parse(event.slice(6)));
    }
  }
}

async function ask(question) {
  conversation.push({ role: "user", content: question });
  addMessage("user").text.textContent = question;
  const shown = addMessage("assistant");
  const system = element("system").value;
  running = new AbortController();
  element("send").hidden = true;
  element("stop").hidden = false;
  const start = performance.now();
  let first = 0;
  let tokens = 0;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: running.signal,
      body: JSON.stringify({
        messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
        temperature: Number(element("temperature").value), max_tokens: Number(element("max-tokens").value),
        stream: true, stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    await readEvents(response, (event) => {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) tokens = event.usage.completion_tokens;
      for (const choice of event.choices) {
        shown.text.textContent += choice.delta.content || "";
        shown.reasoning.textContent += choice.delta.reasoning_content || "";
        if (!first && (choice.delta.content || choice.delta.reasoning_content)) first = performance.now();
        if (choice.finish_reason) shown.box.dataset.finish = choice.finish_reason;
      }
      shown.box.scrollIntoView({ block: "end" });
    });
    const rate = tokens > 1 ? (tokens - 1) / ((performance.now() - first) / 1000) : 0;
    shown.note.textContent = `${tokens} tokens, first after ${((first || start) - start).toFixed(0)} ms, then ${rate.toFixed(1)}/s`;
  } catch (error) {
    shown.note.textContent = error.name === "AbortError" ? "stopped" : error.message;
    shown.note.classList.toggle("error", error.name !== "AbortError");
  }
  conversation.push({ role: "assistant", content: shown.text.textContent });
  running = null;
  element("send").hidden = false;
  element("stop").hidden = true;
  element("question").focus();
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = element("question").value.trim();
  if (question && !running) {
    element("question").value = "";
    ask(question);
  }
});
element("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});
element("stop").addEventListener("click", () => running && running.abort());
element("reset").addEventListener("click", () => {
  if (running) running.abort();
  conversation = [];
  element("messages").replaceChildren();
});

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// Lines over time; all series share the scale from 0 to `most` (or their largest value).
function draw(id, series, most) {
  const canvas = element(id);
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const top = most || Math.max(1, ...series.flatMap((line) => line.values)) * 1.1;
  context.strokeStyle = color("line");
  context.fillStyle = color("muted");
  context.font = "11px system-ui, sans-serif";
  for (const part of [0, 0.5, 1]) {
    const y = height - 4 - part * (height - 18);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillText((top * part).toFixed(top < 10 ? 1 : 0), 2, y - 2);
  }
  for (const line of series) {
    context.strokeStyle = color(line.color);
    context.lineWidth = 2;
    context.beginPath();
    line.values.forEach((value, i) => {
      const x = width - (line.values.length - 1 - i) * (width / (points - 1));
      const y = height - 4 - Math.min(1, value / top) * (height - 18);
      if (i === 0) context.moveTo(x, y); else context.lineTo(x, y);
    });
    context.stroke();
    context.lineWidth = 1;
  }
}

function remember(list, value) {
  list.push(value);
  if (list.length > points) list.shift();
}

let last = null;
async function poll() {
  try {
    const response = await fetch("/v1/loads", { headers: headers() });
    if (!response.ok) throw new Error((await response.json()).error.message);
    const load = await response.json();
    const now = performance.now();
    const rate = last ? (load.generated_tokens - last.tokens) / ((now - last.time) / 1000) : 0;
    last = { tokens: load.generated_tokens, time: now };
    const all = load.max_total_num_tokens || 1;
    remember(history.throughput, rate);
    remember(history.running, load.num_running_reqs);
    remember(history.waiting, load.num_waiting_reqs);
    remember(history.used, 100 * load.num_tokens / all);
    remember(history.kept, 100 * load.num_cached_tokens / all);
    element("throughput-now").textContent = rate.toFixed(1);
    element("queue-now").textContent = `${load.num_running_reqs} + ${load.num_waiting_reqs}`;
    element("cache-now").textContent = `${(100 * load.num_tokens / all).toFixed(1)} %`;
    if (element("model").textContent === "connecting" || element("model").className) describeModel();
  } catch (error) {
    element("model").textContent = error.message;
    element("model").className = "error";
  }
  draw("throughput", [{ values: history.throughput, color: "blue" }]);
  draw("queue", [{ values: history.running, color: "blue" }, { values: history.waiting, color: "orange" }]);
  draw("cache", [{ values: history.used, color: "green" }, { values: history.kept, color: "orange" }], 100);
  setTimeout(poll, 1000);
}

async function describeModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) return;
  const model = (await response.json()).data[0];
  element("model").textContent = `${model.id} · context ${model.max_model_len} tokens`;
  element("model").className = "";
}

poll();
