// What Node's clients share: the server under test, and questions whose answers a tiny model cannot spoil (common.py).

import { test } from "node:test";

export const URL_ = process.env.CLIENTS_URL;
export const MODEL = process.env.CLIENTS_MODEL;
export const QUESTION = "Who are you?";
export const ASKED = [{ role: "user", content: QUESTION }];
export const GREEDY = { temperature: 0, max_tokens: 24 };
export const HOT = { temperature: 1, max_tokens: 400 };
export const ENDLESS = { temperature: 0, max_tokens: 1500 };
export const REPORT = {
  type: "object",
  properties: { sky: { type: "string", enum: ["rain", "sun"] }, is_cold: { type: "boolean" } },
  required: ["sky", "is_cold"],
  additionalProperties: false,
};
export const CITY = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};

// clients/run.py reads the capability before the colon.
export function shows(capability, rule, run) {
  test(`${capability}: ${rule}`, { timeout: 120_000 }, run);
}

export function isReport(value) {
  return ["rain", "sun"].includes(value.sky) && typeof value.is_cold === "boolean";
}

async function numAborted() {
  const text = await (await fetch(`${URL_}/metrics`)).text();
  const found = text.match(/^minivllm:request_success_total\{[^}]*finished_reason="abort"[^}]*\} (\S+)$/m);
  return found ? Number(found[1]) : 0;
}

// What `leave` does ends one request early, and the server ends it too.
export async function oneAborted(leave) {
  const before = await numAborted();
  await leave();
  const deadline = Date.now() + 30_000;
  while ((await numAborted()) !== before + 1) {
    if (Date.now() > deadline) throw new Error("the server goes on with what nobody reads");
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}
