// The real JavaScript clients of OpenAI and Anthropic against a running server: what is streamed is what comes whole.
import assert from "node:assert/strict";
import { test } from "node:test";
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = process.env.TROIKA_URL;
const apiKey = process.env.TROIKA_KEY;
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const model = (await openai.models.list()).data[0].id;
const messages = [{ role: "user", content: "Write a function." }];
const schema = { type: "object", properties: { path: { type: "string", enum: ["a.rs", "b.rs"] } }, required: ["path"] };
const without = (object, ...names) => JSON.parse(JSON.stringify(object, (key, value) => (names.includes(key) ? undefined : value)));

test("chat", async () => {
  const tools = [{ type: "function", function: { name: "read", parameters: schema } }];
  const forced = { tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 300 };
  for (const more of [{}, { reasoning_effort: "low" }, forced]) {
    const body = { model, messages, max_tokens: 24, seed: 7, ...more };
    const whole = await openai.chat.completions.create(body);
    const streamed = await openai.chat.completions.stream(body).finalChatCompletion();
    const said = (reply) => {
      const { content, tool_calls } = reply.choices[0].message;
      const calls = (tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]);
      return { content: content ?? "", calls, finish: reply.choices[0].finish_reason };
    };
    assert.deepEqual(said(streamed), said(whole));
    if (more.tools) assert.ok(["a.rs", "b.rs"].includes(JSON.parse(said(whole).calls[0][1]).path));
  }
});

test("responses", async () => {
  const body = { model, input: "Write a function.", max_output_tokens: 24, temperature: 0 };
  const whole = await openai.responses.create(body);
  let last;
  for await (const event of await openai.responses.create({ ...body, stream: true })) last = event;
  assert.deepEqual(without(last.response.output, "id"), without(whole.output, "id"));
});

test("messages", async () => {
  const tools = [{ name: "read", input_schema: schema }];
  const forced = { tools, tool_choice: { type: "any", disable_parallel_tool_use: true }, max_tokens: 300 };
  for (const more of [{}, { thinking: { type: "enabled", budget_tokens: 1024 } }, forced]) {
    const body = { model, messages, max_tokens: 24, temperature: 0, ...more };
    const whole = await anthropic.messages.create(body);
    const streamed = await anthropic.messages.stream(body).finalMessage();
    const said = (reply) => without([reply.content, reply.stop_reason], "id", "parsed_output");
    assert.deepEqual(said(streamed), said(whole));
  }
});

test("errors", async () => {
  await assert.rejects(openai.chat.completions.create({ model, messages, nonsense: 1 }), OpenAI.BadRequestError);
  await assert.rejects(openai.chat.completions.create({ model: "gpt-4o", messages }), OpenAI.NotFoundError);
  const wrong = new Anthropic({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(wrong.messages.create({ model, messages, max_tokens: 8 }), Anthropic.AuthenticationError);
});
