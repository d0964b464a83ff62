// Engines: their systemd units, jobs for them, and the editable fields of their environment files.

import { ask, askToken, confirm, hasToken, onToken, say, toast } from "./api.js";
import { duration, id, keep, make, size, tell } from "./format.js";

const EVERY = 4000;
let pattern = "", asking = false;

export function show(manages) {
  id("engines-section").hidden = !manages;
  if (manages === pattern) return;
  pattern = manages;
  tell(id("engines-pattern"), pattern);
  refresh();
}

function note(text, button) {
  id("engines-note").replaceChildren(text, ...(button ? [" ", button] : []));
}

async function refresh() {
  if (!pattern || asking || document.hidden) return;
  if (!hasToken()) {
    id("engines").replaceChildren();
    const button = make("button", { type: "button", text: "Enter token" });
    button.addEventListener("click", () => askToken());
    note("Engines are shown once you have entered the token.", button);
    return;
  }
  asking = true;
  try {
    const { problem, units } = await ask("GET", "/engines");
    note(problem || (units.length ? "" : `No unit matches ${pattern}.`) || " ");
    keep(id("engines"), units, (unit) => unit.name, fresh, fill);
  } catch (error) {
    note(error.message);
  }
  asking = false;
}

const DOES = {
  start: "The engine is started: it loads its model, and takes device memory.",
  stop: "The engine is stopped: requests in progress fail, and it accepts no more. What it cached stays.",
  restart: "The engine is stopped and started again: requests in progress fail, and it answers again once its model is loaded. What it cached stays.",
};

function fresh() {
  const name = make("span", { class: "name" }), state = make("span", { class: "pill" }), more = make("span", { class: "quiet" });
  const element = make("div", { class: "engine" });
  const orders = Object.keys(DOES).map((verb) => {
    const button = make("button", { type: "button", text: verb[0].toUpperCase() + verb.slice(1), "data-verb": verb, class: verb === "stop" ? "danger" : "" });
    button.addEventListener("click", () => order(element.unit, verb));
    return button;
  });
  const fields = make("div", { class: "fields" }), problem = make("p", { class: "quiet" });
  const save = make("button", { type: "button", text: "Save…", disabled: true });
  save.addEventListener("click", () => edit(element));
  const bottom = make("div", { class: "save" }, save, make("span", { class: "quiet", text: "Changes take effect when the engine is started again." }));
  element.append(make("div", { class: "head" }, name, state, make("div", { class: "orders" }, ...orders)), more, fields, problem, bottom);
  Object.assign(element, { parts: { name, state, more, orders, fields, problem, save, bottom }, shown: "" });
  return element;
}

function fill(element, unit) {
  const { parts } = element;
  const other = element.shown !== unit.version; // the file has changed: keep what is being typed
  const typed = new Set(other && element.unit ? differences(element).map((field) => field.name) : []);
  element.unit = unit;
  tell(parts.name, unit.name);
  tell(parts.state, unit.active === unit.sub ? unit.active : `${unit.active}, ${unit.sub}`);
  const class_ = { active: "pill good", failed: "pill bad", activating: "pill warn", deactivating: "pill warn" }[unit.active] ?? "pill";
  if (parts.state.className !== class_) parts.state.className = class_;
  const facts = [unit.description];
  if (unit.since) facts.push(`for ${duration(Date.now() / 1000 - unit.since)}`);
  if (unit.pid) facts.push(`pid ${unit.pid}`);
  if (unit.memory_bytes) facts.push(size(unit.memory_bytes));
  if (unit.restarts) facts.push(`restarted ${unit.restarts} times`);
  if (!["", "success"].includes(unit.result)) facts.push(`last result: ${unit.result}`);
  if (unit.load !== "loaded") facts.push(`unit ${unit.load}`);
  tell(parts.more, facts.join(" · "));
  const runs = ["active", "activating", "reloading"].includes(unit.active);
  parts.orders.forEach((button) => (button.disabled = button.dataset.verb === "start" ? runs : !runs));
  tell(parts.problem, unit.problem);
  parts.bottom.hidden = !unit.fields.length;
  if (other) {
    element.shown = unit.version;
    keep(parts.fields, unit.fields, (field) => field.name, (field) => labelled(element, field), (label, field) => put(label.control, field, typed.has(field.name)));
    changed(element);
  }
}

function labelled(element, field) {
  const input = field.kind === "choice"
    ? make("select")
    : make("input", { type: "text", autocomplete: "off", spellcheck: "false", inputmode: field.kind === "int" ? "numeric" : "text" });
  input.name = field.name;
  input.title = field.help;
  input.addEventListener("input", () => changed(element));
  return make("label", { text: field.label }, input);
}

// The input element is reused, and its value is kept if it was `typed`: somebody may be typing.
function put(input, field, typed) {
  const value = typed ? input.value : field.value, unset = field.default && `default: ${field.default}`;
  if (field.kind === "choice") {
    const choices = new Set([...field.choices, field.value, value].filter(Boolean));
    input.replaceChildren(make("option", { value: "", text: unset }), ...[...choices].map((text) => make("option", { value: text, text })));
  } else {
    input.placeholder = unset;
  }
  if (input.value !== value) input.value = value;
}

function differences(element) {
  return element.unit.fields.flatMap((field) => {
    const input = element.parts.fields.querySelector(`[name="${field.name}"]`);
    const differs = input.value.trim() !== field.value;
    input.classList.toggle("changed", differs);
    return differs ? [{ ...field, wanted: input.value.trim() }] : [];
  });
}

function changed(element) {
  element.parts.save.disabled = !differences(element).length;
}

function order(unit, verb) {
  confirm({
    title: `${verb[0].toUpperCase()}${verb.slice(1)} ${unit.name}?`,
    body: [say(DOES[verb])],
    yes: verb[0].toUpperCase() + verb.slice(1),
    danger: verb !== "start",
    act: async () => {
      await ask("POST", `/engines/${encodeURIComponent(unit.name)}/${verb}`);
      toast(`${unit.name}: ${verb} was ordered.`);
      refresh();
    },
  });
}

function edit(element) {
  const { unit } = element, found = differences(element);
  const old = (field) => field.value || "default", wanted = (field) => field.wanted || "default";
  confirm({
    title: `Change ${unit.file}?`,
    body: [
      make("ul", {}, ...found.map((field) => make("li", { text: `${field.label}: ${old(field)} → ${wanted(field)}` }))),
      say("The rest of the file is unchanged, and a backup is kept beside it. The engine uses the old values until it is restarted."),
    ],
    yes: "Change",
    act: async () => {
      const values = Object.fromEntries(found.map((field) => [field.name, field.wanted]));
      await ask("PUT", `/engines/${encodeURIComponent(unit.name)}`, { version: unit.version, values });
      toast(`${unit.file} is changed. Restart ${unit.name} to apply it.`);
      refresh();
    },
  });
}

onToken(() => refresh());
setInterval(refresh, EVERY);
