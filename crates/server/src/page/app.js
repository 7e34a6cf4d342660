"use strict";

const byId = (id) => document.getElementById(id);
const POLL_MS = 2000;
const KEY_NAME = "troika-key";

let history = [];
let running = null;
let before = null;

function headers() {
  const key = sessionStorage.getItem(KEY_NAME);
  return key ? { authorization: `Bearer ${key}` } : {};
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

// Status

const seconds = (us) => (us === null ? "" : `${(us / 1e6).toFixed(2)} s`);

function rate(status, now) {
  const last = before;
  before = { now, prompt: status.prompt_tokens_total, answer: status.completion_tokens_total };
  if (!last || now <= last.now) return "";
  const per = (more) => ((more * 1000) / (now - last.now)).toFixed(1);
  return `${per(before.prompt - last.prompt)} prompt tok/s, ${per(before.answer - last.answer)} answer tok/s`;
}

function showStatus(status) {
  byId("health").textContent = status.reason ? `${status.status}: ${status.reason}` : status.status;
  const facts = {
    model: status.model,
    devices: status.devices.join(", "),
    context: `${status.max_context_tokens} tokens`,
    "in flight": `${status.running} running, ${status.queued} waiting`,
    rates: rate(status, performance.now()),
    served: `${status.requests_total} requests, ${status.completion_tokens_total} tokens`,
    "up for": `${status.uptime_s} s`,
    version: status.version,
  };
  byId("facts").replaceChildren(
    ...Object.entries(facts).flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]),
  );
  byId("requests").replaceChildren(
    ...status.requests.map((request) => {
      const decode = request.first_token_us === null ? 0 : request.total_us - request.first_token_us;
      const speed = decode > 0 && request.completion_tokens > 1;
      const row = element("tr");
      const cells = [
        new Date(request.started_unix_s * 1000).toLocaleTimeString(),
        request.route,
        request.prompt_tokens,
        request.completion_tokens,
        seconds(request.first_token_us),
        seconds(request.total_us),
        speed ? (((request.completion_tokens - 1) * 1e6) / decode).toFixed(1) : "",
        request.ending,
      ];
      row.append(...cells.map((cell) => element("td", "", String(cell))));
      return row;
    }),
  );
}

async function poll() {
  try {
    const reply = await fetch("/troika/status", { headers: headers() });
    byId("key-form").hidden = reply.status !== 401;
    if (reply.ok) showStatus(await reply.json());
    else byId("health").textContent = reply.status === 401 ? "an API key is needed" : `status ${reply.status}`;
  } catch {
    byId("health").textContent = "the server does not answer";
  }
  setTimeout(poll, POLL_MS);
}

// Chat

function addTurn(who, className) {
  const turn = element("div", `turn ${className}`);
  turn.append(element("div", "who", who));
  byId("log").append(turn);
  return turn;
}

function answerTurn() {
  const turn = addTurn("model", "model");
  const details = element("details");
  const thought = element("div", "thought");
  details.append(element("summary", "", "Reasoning"), thought);
  details.open = true;
  details.hidden = true;
  const text = element("div", "text");
  turn.append(details, text);
  return { details, thought, text };
}

function scrolled(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function show(shown, delta) {
  const log = byId("log");
  const follow = scrolled(log);
  if (delta.reasoning_content) {
    shown.details.hidden = false;
    shown.thought.append(delta.reasoning_content);
  }
  if (delta.content) shown.text.append(delta.content);
  if (follow) log.scrollTop = log.scrollHeight;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ")) yield block.slice("data: ".length);
    }
  }
}

async function answer(shown, signal) {
  const reply = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers() },
    body: JSON.stringify({ messages: history, stream: true, reasoning_effort: byId("effort").value }),
    signal,
  });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  let [content, ended] = ["", false];
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") ended = true;
    else {
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      show(shown, delta);
      content += delta.content ?? "";
    }
  }
  if (!ended) throw new Error("the answer broke off");
  return content;
}

function setRunning(controller) {
  running = controller;
  byId("send").disabled = running !== null;
  byId("stop").disabled = running === null;
}

async function send() {
  const prompt = byId("prompt").value.trim();
  if (!prompt || running) return;
  notice("");
  byId("prompt").value = "";
  addTurn("you", "user").append(element("div", "text", prompt));
  history.push({ role: "user", content: prompt });
  const shown = answerTurn();
  const controller = new AbortController();
  const asked = history;
  setRunning(controller);
  try {
    const content = await answer(shown, controller.signal);
    asked.push({ role: "assistant", content });
  } catch (error) {
    asked.push({ role: "assistant", content: shown.text.textContent });
    notice(controller.signal.aborted ? "" : String(error.message ?? error));
  }
  setRunning(null);
  byId("prompt").focus();
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
byId("clear").addEventListener("click", () => {
  running?.abort();
  history = [];
  byId("log").replaceChildren();
  notice("");
  byId("prompt").focus();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_NAME, byId("key").value);
  byId("key").value = "";
  byId("key-form").hidden = true;
});
poll();
