// The server that this page came from, and no other. Paths are relative, so that it may stand behind a prefix.

const BASE = new URL("../", import.meta.url);
const KEY = "minivllm.key"; // in the session's storage: this tab, until it is closed

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    dispatchEvent(new Event("key"));
  },
};

/** What went wrong, in words. `status` is 0 if there was no answer; `param` names the field that is to blame. */
export class ApiError extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const NO_ANSWER = "The server does not answer. Is it still running?";
const CUT_OFF = "The connection ended before the answer did.";

/** A response with status 200. Raises ApiError, or AbortError if `signal` said so. */
export async function ask(path, { body, signal } = {}) {
  const headers = body ? { "content-type": "application/json" } : {};
  if (key.get()) headers.authorization = `Bearer ${bytes(key.get())}`;
  let response;
  try {
    const method = body ? "POST" : "GET";
    response = await fetch(new URL(path, BASE), { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError(NO_ANSWER);
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw inWords(response.status, told?.error, response.headers.get("retry-after"));
}

/** A header holds bytes: those of the text in UTF-8, as the server compares them. */
const bytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

function inWords(status, error, retryAfter) {
  if (status === 401) {
    const what = key.get() ? "The server does not accept this API key." : "This server asks for an API key.";
    return new ApiError(`${what} Enter it in the settings.`, status, "key");
  }
  const text = error?.message ?? `The server answered with status ${status} and no reason.`;
  const wait = status === 429 && retryAfter ? ` You may try again in ${retryAfter} s.` : "";
  return new ApiError(sentence(text) + wait, status, error?.param);
}

function sentence(text) {
  const begun = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

/** The objects of a stream of server-sent events, until [DONE]. Raises the error that is one, and an early end. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ApiError(CUT_OFF);
      });
      if (done) throw new ApiError(CUT_OFF);
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (!part.startsWith("data: ")) continue;
        if (part === "data: [DONE]") return;
        const data = JSON.parse(part.slice(6));
        if (data.error) throw inWords(500, data.error);
        yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have ended by itself
  }
}
