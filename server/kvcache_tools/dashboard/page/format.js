// Formats numbers and times, and creates elements without parsing markup.

export function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(bytes) < 1024) return unit === "B" ? `${Math.round(bytes)} B` : `${bytes.toFixed(1)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

export const count = (number) => Math.round(number).toLocaleString("en-US");

export function ratio(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–";
}

export function short(number) {
  for (const [unit, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (number >= factor) return `${Number((number / factor).toFixed(1))} ${unit}`;
  }
  return String(Number(number.toFixed(number < 10 ? 2 : 0)));
}

export function duration(seconds) {
  const [s, m, h, d] = [Math.floor(seconds), Math.floor(seconds / 60), Math.floor(seconds / 3600), Math.floor(seconds / 86400)];
  if (d) return `${d} d ${h % 24} h`;
  if (h) return `${h} h ${m % 60} min`;
  return m ? `${m} min` : `${Math.max(s, 0)} s`;
}

export function clock(at, withSeconds = false) {
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}${withSeconds ? `:${two(date.getSeconds())}` : ""}`;
}

export const plural = (number, what) => `${count(number)} ${what}${number === 1 ? "" : "s"}`;

export const words = (name) => name.replaceAll("_", " ");

export const id = (name) => document.getElementById(name);

// Creates an element; `what` has its attributes, and its text as `text`. Nothing is ever parsed as markup.
export function make(name, what = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "title", "desc", "g"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(what)) {
    if (key === "text") element.textContent = value;
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

// Sets the text only if it differs, to preserve a selection.
export function tell(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Makes the children of `parent` match `items`: `fresh(item)` creates one, `fill(element, item)` updates it.
// Elements are reused by key, so that a button under the pointer stays the same one.
export function keep(parent, items, key, fresh, fill) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = null;
  for (const item of items) {
    const name = String(key(item));
    let element = known.get(name);
    known.delete(name);
    if (!element) {
      element = fresh(item);
      element.dataset.key = name;
    }
    fill(element, item);
    const next = at ? at.nextElementSibling : parent.firstElementChild;
    if (next !== element) parent.insertBefore(element, next);
    at = element;
  }
  known.forEach((element) => element.remove());
}
