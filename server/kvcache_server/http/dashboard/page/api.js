// What is asked of the dashboard, the token, and the dialog in front of every action.

import { id, make, tell } from "./format.js";

let token = ""; // in this page's memory alone: a reload forgets it
const heard = [];

export const hasToken = () => token !== "";
export const onToken = (listener) => heard.push(listener);

function setToken(text) {
  token = text;
  tell(id("token"), token ? "Forget token" : "Give token");
  heard.forEach((listener) => listener());
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Returns the answer; throws Refused with what the daemon or the dashboard says. A token that is wrong is forgotten.
export async function ask(method, path, body, as = token) {
  const headers = { "X-KVCache-Dashboard": "1" };
  if (as) headers.Authorization = `Bearer ${as}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw new Refused(0, "The dashboard does not answer.");
  }
  const answer = await response.json().catch(() => ({ message: response.statusText }));
  if (response.ok) return answer;
  if ((response.status === 401 || response.status === 403) && as === token) setToken("");
  throw new Refused(response.status, response.status === 403 ? "The token is wrong." : answer.message);
}

let hiding = 0;
export function toast(text) {
  const element = id("toast");
  tell(element, text);
  element.classList.add("shown");
  clearTimeout(hiding);
  hiding = setTimeout(() => element.classList.remove("shown"), 6000);
}

// Shows `body` under `title`; `act()` is done on `yes`, and the dialog stays open with what it throws.
export function dialog({ title, body, yes, danger = false, act }) {
  const box = id("dialog"), form = id("dialog-form"), button = id("dialog-yes");
  tell(id("dialog-title"), title);
  id("dialog-body").replaceChildren(...body);
  tell(id("dialog-error"), "");
  tell(button, yes);
  button.className = danger ? "main danger" : "main";
  button.disabled = false;
  form.onsubmit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    tell(id("dialog-error"), "");
    try {
      await act();
      box.close();
    } catch (error) {
      tell(id("dialog-error"), error.message);
    }
    button.disabled = false;
  };
  id("dialog-no").onclick = () => box.close();
  box.showModal();
}

export const say = (text) => make("p", { text });

export function askToken(then = () => {}) {
  const input = make("input", { type: "password", name: "token", required: true, autocomplete: "off", spellcheck: "false" });
  dialog({
    title: "Give the token",
    body: [
      say("Actions want the daemon's token. It is in the file beside the daemon's endpoint that ends in .token, which the daemon's user can read."),
      make("label", { text: "Token" }, input),
      say("This page keeps it until it is closed or loaded again, and stores it nowhere."),
    ],
    yes: "Use it",
    act: async () => {
      const given = input.value.trim();
      await ask("POST", "/api/v1/token", undefined, given);
      setToken(given);
      setTimeout(then);
    },
  });
}

// Asks for the token first, where there is none yet.
export function confirm(what) {
  if (hasToken()) dialog(what);
  else askToken(() => dialog(what));
}

id("token").addEventListener("click", () => (hasToken() ? setToken("") : askToken()));
