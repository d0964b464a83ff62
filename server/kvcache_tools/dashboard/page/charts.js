// Charts over time, drawn as SVG: lines over buckets of points, an axis with three or four round values, clock times below.

import { clock, id, make, tell } from "./format.js";

const HEIGHT = 170, LEFT = 72, RIGHT = 8, TOP = 10, BOTTOM = 24, BUCKETS = 150;

// Sums the points of each bucket; buckets are aligned to multiples of their width, so that a chart does not shimmer as it moves.
export function buckets(points, now, span) {
  const step = Math.max(2, span / BUCKETS);
  const first = Math.floor((now - span) / step) + 1;
  const found = [];
  for (const point of points) {
    const at = Math.floor(point.at / step) - first;
    if (at < 0) continue;
    const sum = (found[at] ??= {});
    for (const name in point) sum[name] = (sum[name] ?? 0) + point[name];
    Object.assign(sum, { at: (first + at + 0.5) * step, used_bytes: point.used_bytes });
  }
  // A late report leaves an empty bucket; only a longer silence is a gap.
  return { first: now - span, last: now, step, list: found.filter(Boolean), gap: Math.max(4 * step, 10) };
}

function ceiling(most, powers) {
  if (!(most > 0)) return powers === 1024 ? 1024 : 1;
  const unit = powers ** Math.floor(Math.log(most) / Math.log(powers));
  const digits = powers === 1024 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 4, 5, 10];
  return unit * digits.find((digit) => digit * unit >= most);
}

export class Chart {
  // `lines` are {name, style, value(bucket) -> number or null}; `most`: the end of the axis if it is fixed; otherwise a round number to the base `powers`.
  constructor(name, { title, lines, label, read = label, most, powers = 10 }) {
    Object.assign(this, { title, lines, label, read, most, powers });
    this.box = id(`chart-${name}`);
    this.keys = id(`keys-${name}`);
    this.texts = lines.map(({ name: text, style }) => {
      const value = make("span");
      const key = make("span", {}, make("i", { class: `dot s${style[0]}` }), text ? `${text} ` : "", value);
      this.keys.append(key);
      return value;
    });
    this.titleElement = make("title", { id: `title-${name}`, text: title });
    this.desc = make("desc", { id: `desc-${name}` });
    this.plot = make("g");
    this.cross = make("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg = make("svg", { role: "img", "aria-labelledby": `title-${name} desc-${name}` }, this.titleElement, this.desc, this.plot, this.cross);
    this.box.append(this.svg);
    this.pointer = null;
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
  }

  point(x) {
    this.pointer = x;
    if (this.data) this.tellKeys();
  }

  draw(data, most = this.most) {
    this.data = data;
    this.width = Math.max(this.box.clientWidth, 200);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const values = this.lines.map(({ value }) => data.list.map(value));
    const top = most ?? ceiling(Math.max(0, ...values.flat().filter((each) => each !== null)), this.powers);
    const x = (this.x = (at) => LEFT + ((at - data.first) / (data.last - data.first)) * (this.width - LEFT - RIGHT));
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [0, 0.25, 0.5, 0.75, 1].flatMap((part) => [
      make("line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y(part * top), y2: y(part * top) }),
      ...(part % 0.5 ? [] : [make("text", { x: LEFT - 8, y: y(part * top) + 4, "text-anchor": "end", text: this.label(part * top) })]),
    ]);
    const span = data.last - data.first;
    const tick = [60, 120, 300, 600, 900, 1800].find((each) => (span / each) * 70 <= this.width - LEFT) ?? 3600;
    for (let at = Math.ceil(data.first / tick) * tick; at < data.last; at += tick) {
      if (x(at) > LEFT + 14 && x(at) < this.width - 20) {
        parts.push(make("text", { x: x(at), y: HEIGHT - 6, "text-anchor": "middle", text: clock(at) }));
      }
    }
    this.lines.forEach(({ style }, line) => {
      let path = "", before = null;
      data.list.forEach((bucket, at) => {
        const value = values[line][at];
        if (value === null) return;
        const joined = before !== null && bucket.at - before < data.gap;
        // A single point is a short stroke, so that it is visible.
        path += `${joined ? "L" : "M"}${x(bucket.at).toFixed(1)},${y(value).toFixed(1)}${joined ? "" : "h.5"}`;
        before = bucket.at;
      });
      if (path) parts.push(make("path", { class: `line s${style}`, fill: "none", d: path }));
    });
    this.plot.replaceChildren(...parts);
    this.tellKeys();
  }

  // The values in the legend: those of the bucket under the pointer, else of the last one.
  tellKeys() {
    const { list } = this.data;
    let bucket = list.at(-1), when = "now";
    if (this.pointer !== null && list.length) {
      const away = (each) => Math.abs(this.x(each.at) - this.pointer);
      bucket = list.reduce((best, each) => (away(each) < away(best) ? each : best));
      when = clock(bucket.at, true);
      this.cross.setAttribute("x1", this.x(bucket.at));
      this.cross.setAttribute("x2", this.x(bucket.at));
    }
    this.cross.setAttribute("visibility", this.pointer !== null && bucket ? "visible" : "hidden");
    const told = this.lines.map(({ value, name }, at) => {
      const found = bucket ? value(bucket) : null;
      tell(this.texts[at], found === null ? "–" : this.read(found));
      return `${name || this.title} ${this.texts[at].textContent}`;
    });
    tell(this.desc, `${when === "now" ? "Now" : when}: ${told.join(", ")}`);
  }
}
