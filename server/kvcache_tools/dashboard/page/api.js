// Requests to the dashboard, the token, and the dialog before every action.

import { id, make, tell } from "./format.js";

let token = ""; // only in this page's memory: a reload forgets it
const heard = [];

export const hasToken = () => token !== "";
export const onToken = (listener) => heard.push(listener);

function setToken(text) {
  token = text;
  tell(id("token"), token ? "Forget token" : "Enter token");
  heard.forEach((listener) => listener());
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Returns the answer; throws Refused with the message of the daemon or the dashboard. A wrong token is forgotten.
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

// Shows `body` under `title`; `yes` calls `act()`, and the dialog stays open if that throws.
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
    title: "Enter the token",
    body: [
      say("Actions need the daemon's token. It is in the file that ends in .token, beside the daemon's endpoint, and can be read by the daemon's user."),
      make("label", { text: "Token" }, input),
      say("This page keeps it in memory until it is closed or reloaded."),
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

// Asks for the token first, if there is none yet.
export function confirm(what) {
  if (hasToken()) dialog(what);
  else askToken(() => dialog(what));
}

id("token").addEventListener("click", () => (hasToken() ? setToken("") : askToken()));
