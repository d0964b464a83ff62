// The page: polls the dashboard every two seconds, and updates what has changed.

import { ask, confirm, say, toast } from "./api.js";
import { Chart, buckets } from "./charts.js";
import { show as showEngines } from "./engines.js";
import { clock, count, duration, id, keep, make, plural, ratio, short, size, tell, words } from "./format.js";

const EVERY = 2000, HOUR = 3600;
const STYLES = ["a", "b", "c", "d", "e", "f"];
const STATES = [["ready", "a"], ["writing", "b"], ["quarantined", "e"], ["free", "free"]];
const OPERATOR = "kvcache-server"; // what `status` and `top` attach as

let tiersThen = { at: 0, tiers: [] }, tierRates = new Map(); // the last report of tiers, and rates since the one before
let points = [], next = 0, began = 0, span = 900, data = null, heard = 0, failed = 0;

const rate = (name) => (bucket) => (bucket.seconds ? bucket[name] / bucket.seconds : null);
const part = (of) => (bucket) => (bucket.requested_blocks ? Math.min(1, of(bucket) / bucket.requested_blocks) : null);
const percent = (value) => `${Math.round(100 * value)} %`;
const percents = (value) => `${(100 * value).toFixed(1)} %`;
const CHARTS = [
  new Chart("ratio", { title: "Hit ratio over time", label: percent, read: percents, most: 1, lines: [
    { name: "hit", style: "a", value: part((bucket) => bucket.hit_blocks) },
    { name: "unlimited", style: "d dashed", value: part((bucket) => bucket.hit_blocks + bucket.lost_blocks) },
  ] }),
  new Chart("traffic", { title: "Traffic over time", label: (value) => `${size(value).replace(/\.0 /, " ")}/s`, read: (value) => `${size(value)}/s`, powers: 1024, lines: [
    { name: "loaded", style: "a", value: rate("loaded_bytes") },
    { name: "saved", style: "b", value: rate("saved_bytes") },
  ] }),
  new Chart("evicted", { title: "Evicted blocks per second", label: short, lines: [{ name: "", style: "e", value: rate("evicted_blocks") }] }),
  new Chart("used", { title: "Pool used over time", label: (value) => size(value).replace(/\.0 /, " "), read: size, lines: [
    { name: "", style: "c", value: (bucket) => bucket.used_bytes },
  ] }),
];

let asking = null; // one request at a time: each asks for the points after the last one
const refresh = () => (asking ??= look().finally(() => (asking = null)));

async function look() {
  try {
    const response = await fetch(`/data?since=${next}`, { cache: "no-store" });
    if (!response.ok) throw new Error(`it answers ${response.status}`);
    data = await response.json();
    heard = Date.now() / 1000;
    failed = 0;
    take(data);
  } catch (error) {
    failed ||= Date.now() / 1000;
    console.debug(error);
  }
  tellState();
  if (data?.status) show(data);
}

function take({ history, now, ...rest }) {
  if (rest.began !== began) { // another dashboard process, with another history
    points = [];
    if (began && next) {
      next = 0;
      began = rest.began;
      return;
    }
    began = rest.began;
  }
  for (const row of history.points) points.push(Object.fromEntries(history.fields.map((name, at) => [name, row[at]])));
  while (points.length && points[0].at < now - HOUR - 60) points.shift();
  next = history.next;
  showEngines(rest.manages);
}

function tellState() {
  const pill = id("state"), banner = id("banner"), main = id("main");
  let kind = "good", text = "answering", told = "";
  if (failed) {
    [kind, text] = ["bad", "no dashboard"];
    told = `The dashboard has not answered since ${clock(failed, true)}.${data ? ` The page shows data from ${clock(heard, true)}.` : ""}`;
  } else if (data?.away) {
    [kind, text] = ["bad", "daemon away"];
    told = `The daemon has not answered since ${clock(data.away.since, true)} (${duration(data.now - data.away.since)}): ${data.away.why}.`;
    told += data.status ? ` The page shows data from ${clock(data.answered, true)}.` : " No data has been received yet.";
  } else if (!data) [kind, text] = ["", "loading"];
  else if (data.status.grace) {
    [kind, text] = ["warn", "in grace"];
    told = "The daemon has been restarted: sessions of the previous one are reconnecting, and nothing is evicted or cleared meanwhile.";
  }
  tell(pill, text);
  pill.className = `pill ${kind}`;
  tell(banner, told);
  banner.hidden = !told;
  main.classList.toggle("loading", !data?.status);
  main.classList.toggle("stale", Boolean(failed || data?.away));
  const acts = Boolean(data?.status && !failed && !data.away);
  document.querySelectorAll("button.acts, .acts select, #namespaces button, #sessions button").forEach((each) => (each.disabled = !acts));
}

function show({ status, now, host, answered }) {
  const last = points.filter((point) => point.at > now - 60);
  const sum = (list, name) => list.reduce((total, each) => total + each[name], 0);
  const spaces = [...status.namespaces].sort((one, other) => other.bytes - one.bytes || one.id.localeCompare(other.id));
  const [asked, hit, lost] = ["requested_blocks", "hit_blocks", "lost_blocks"].map((name) => sum(spaces, name));
  const { pool, daemon } = status;
  const others = [OPERATOR, ...(daemon.tiers ?? []).map((tier) => `tier ${tier.name}`)];
  const engines = status.sessions.filter((session) => !others.includes(session.engine));

  tell(id("which"), `${daemon.endpoint}, version ${daemon.version}, up ${duration(daemon.uptime_s)}`);
  tell(id("tile-now"), ratio(sum(last, "hit_blocks"), sum(last, "requested_blocks")));
  tell(id("tile-now-more"), `of ${count(sum(last, "requested_blocks"))} blocks`);
  tell(id("tile-all"), ratio(hit, asked));
  tell(id("tile-all-more"), `${count(hit)} of ${count(asked)}`);
  tell(id("tile-lost"), ratio(Math.min(hit + lost, asked), asked));
  tell(id("tile-lost-more"), lost ? `about ${count(lost)} more hits` : "nothing more");
  tell(id("tile-used"), ratio(pool.used_bytes, pool.bytes));
  tell(id("tile-used-more"), `${size(pool.used_bytes)} of ${size(pool.bytes)}`);
  tell(id("tile-engines"), count(new Set(engines.map((session) => session.engine)).size));
  tell(id("tile-engines-more"), `${plural(engines.length, "session")}, ${count(status.away.length)} away`);
  drawCharts();

  stack("pool-states", STATES.map(([name, style]) => ({ name, style, bytes: pool[`${name}_bytes`] })), pool.bytes);
  stack("pool-spaces", byNamespace(spaces), pool.bytes);
  facts("pool-facts", [
    ["pinned by leases", size(pool.pinned_bytes)], ["also on devices", size(pool.doubled_bytes ?? 0)], ["runs of free pages", count(pool.free_runs)],
    ["blocks", `${count(pool.blocks)} found, ${count(pool.blocks_writing)} being written, ${count(pool.blocks_hidden)} waiting for a parent`],
  ]);
  showEviction(status);
  const evicted = { ...status.evictions };
  const total = Object.values(evicted).reduce((one, other) => one + other, 0);
  bars("evictions", [...named(evicted, total, "e"), ...(total ? [{ name: "never read", share: status.evicted_unread / total, value: `${count(status.evicted_unread)} (${ratio(status.evicted_unread, total)})`, style: "f" }] : [])], "Nothing has been evicted.");
  const refused = Object.values(status.refusals).reduce((one, other) => one + other, 0);
  bars("refusals", named(status.refusals, refused, "b"), "Nothing has been refused.");
  table("namespaces", spaces, (space) => space.id, namespaceCells, "Clear…", clearOf, "No namespace yet.");
  const away = status.away.map((each) => ({ ...each, away: true }));
  table("sessions", [...away, ...status.sessions], (session) => session.id, sessionCells, "Fence off…", (session) => session.away && fenceOff(session), "No session is attached.");
  showTiers(daemon, answered);
  showHost(host);
  facts("daemon", [
    ["process", `pid ${daemon.pid}, up ${duration(daemon.uptime_s)}`], ["region", `${daemon.region}, ${size(daemon.region_bytes)}`],
    ["locked into memory", daemon.locked ? "yes" : "no"], ["messages", count(daemon.messages)],
    ["errors answered", counts(daemon.errors, "none")], ["replies not delivered", counts(daemon.drops, "none")],
    ["handshakes refused", counts(daemon.handshakes_refused, "none")],
    ["integrity", `${count(daemon.integrity.checks)} checks, ${count(daemon.integrity.failures)} failures`], ["API", data.api],
  ]);
  const level = id("level");
  if (document.activeElement !== level && !id("dialog").open) level.value = daemon.log_level;
}

function drawCharts() {
  if (!data?.status) return;
  const now = buckets(points, data.now, span);
  CHARTS.forEach((chart) => chart.draw(now, chart === CHARTS[3] ? data.status.pool.bytes : chart.most));
}

function showEviction({ eviction: { by_age, declined_blocks }, evictions, evicted_early: early, hindsight }) {
  const evicted = Object.values(evictions).reduce((one, other) => one + other, 0), asked = hindsight?.requested_blocks;
  const way = by_age ? "The least recently used blocks are evicted: in the sample, that finds more than eviction by worth."
    : "The blocks that are worth least are evicted.";
  tell(id("eviction"), [
    way, ...(declined_blocks ? [`Blocks not stored, because they were worth less than each cached one: ${count(declined_blocks)}.`] : []),
    ...(early ? [`Evicted, and asked for within a minute: ${count(early)} (${ratio(early, evicted)} of the evicted).`] : []),
    ...(asked ? [`Hits in a sample of the last ${duration(hindsight.seconds)}: ${ratio(hindsight.hit_blocks, asked)}; a policy that knows the future: ${ratio(hindsight.optimum_blocks, asked)}.`] : []),
  ].join(" "));
}

const counts = (table, none) => Object.entries(table).map(([name, number]) => `${words(name)} ${count(number)}`).join(", ") || none;

function byNamespace(spaces) {
  const shown = spaces.length > STYLES.length ? spaces.slice(0, STYLES.length - 1) : spaces;
  const rest = spaces.slice(shown.length).reduce((total, space) => total + space.bytes, 0);
  const items = shown.map((space, at) => ({ name: space.model, key: space.id, style: STYLES[at], bytes: space.bytes }));
  return rest ? [...items, { name: `${spaces.length - shown.length} more`, key: "rest", style: "f", bytes: rest }] : items;
}

function stack(name, items, whole) {
  const box = id(name), key = (item) => item.key ?? item.name;
  box.setAttribute("aria-label", items.map((item) => `${item.name} ${size(item.bytes)}`).join(", "));
  keep(box, items.filter((item) => item.bytes > 0), key, (item) => make("i"), (element, item) => {
    element.className = `s${item.style}`;
    element.style.flex = `${item.bytes / whole} 1 0`;
  });
  keep(id(`${name}-legend`), items, key, () => make("li", {}, make("i"), make("span", { class: "what" }), make("span"), make("span", { class: "part" })), (element, item) => {
    const [dot, what, value, part] = element.children;
    dot.className = `dot s${item.style}`;
    tell(what, item.name);
    what.title = item.name;
    tell(value, size(item.bytes));
    tell(part, ratio(item.bytes, whole));
  });
}

function facts(name, items) {
  const flat = items.flatMap(([what, value]) => [{ key: `${what}-dt`, tag: "dt", text: what }, { key: `${what}-dd`, tag: "dd", text: value }]);
  keep(id(name), flat, (item) => item.key, (item) => make(item.tag), (element, item) => tell(element, item.text));
}

const named = (table, total, style) => Object.entries(table).filter(([, number]) => number).sort((one, other) => other[1] - one[1])
  .map(([name, number]) => ({ name: words(name), share: number / total, value: count(number), style }));

function bars(name, items, none = "") {
  const flat = items.length
    ? items.flatMap((item) => ["name", "bar", "value"].map((kind) => ({ ...item, kind, key: `${item.name} ${kind}` })))
    : [{ kind: "none", key: "none", value: none }];
  keep(id(name), flat, (item) => item.key, ({ kind }) => make("span", { class: kind }, ...(kind === "bar" ? [make("i")] : [])), (element, item) => {
    if (item.kind === "bar") {
      element.firstChild.className = `s${item.style}`;
      element.firstChild.style.width = `${Math.min(100, 100 * item.share)}%`;
    } else tell(element, item.kind === "name" ? item.name : item.value);
  });
}

// A table's rows: `cells(item)` returns [heading, text, class] each; `act(item)` returns the action of its button, or nothing.
function table(name, items, key, cells, label, act, none) {
  const rows = items.length ? items : [{ none }];
  keep(id(name), rows, (item) => (item.none ? "none" : key(item)), () => make("tr"), (row, item) => {
    if (item.none) {
      if (!row.firstChild) row.append(make("td", { class: "none", colspan: 9, text: none }));
      return;
    }
    row.item = item;
    const found = cells(item);
    if (!row.firstChild) {
      row.append(...found.map(([heading, , kind]) => make("td", { "data-name": heading, class: kind ?? "" })), make("td"));
    }
    found.forEach(([, text], at) => tell(row.children[at], text));
    const doing = act(item), last = row.lastChild;
    if (doing && !last.firstChild) {
      const button = make("button", { type: "button", text: label, class: "danger" });
      button.addEventListener("click", () => act(row.item)());
      last.append(button);
    } else if (!doing) last.replaceChildren();
  });
}

const namespaceCells = (space) => [
  ["Model", space.model], ["Id", space.id], ["Blocks", count(space.blocks), "n"], ["Size", size(space.bytes), "n"],
  ["Saved", count(space.saved_blocks), "n"], ["Requested", count(space.requested_blocks), "n"], ["Hit", ratio(space.hit_blocks, space.requested_blocks), "n"],
  ["Unlimited", ratio(Math.min(space.hit_blocks + space.lost_blocks, space.requested_blocks), space.requested_blocks), "n"],
];

const sessionCells = (session) => [
  ["Engine", session.engine], ["Process", session.away ? "away: disconnected, process alive" : session.label || "–"],
  ["Session", String(session.id), "n"], ["For", session.away ? "–" : duration(session.age_s), "n"],
  ["Leases", session.away ? "–" : count(session.leases), "n"], ["Open saves", count(session.reservations), "n"],
  ["Breaker", session.away ? "–" : words(session.breaker)],
];

function showTiers({ tiers = [], tier_processes: processes = [] }, at) {
  if (at !== tiersThen.at) {
    const then = new Map(tiersThen.tiers.map((tier) => [tier.name, tier]));
    // One that has just come back goes on with its former counts: they are no rate.
    const rate = (tier, key) => Math.max(0, (tier[key] ?? 0) - ((then.get(tier.name) ?? tier)[key] ?? 0)) / (at - tiersThen.at);
    tierRates = new Map(tiers.map((tier) => [tier.name, ["bytes_brought", "bytes_written"].map((key) => rate(tier, key))]));
    tiersThen = { at, tiers };
  }
  const ended = processes.filter(({ name }) => !tiers.some((tier) => tier.name === name));
  const rows = [...tiers, ...ended.map(({ name, ended: why }) => ({ name, off: why || "starting", absent: true }))];
  id("tiers-section").hidden = !rows.length;
  table("tiers", rows, (tier) => tier.name, tierCells, "", () => null, "No tier.");
}

function tierCells(tier) {
  const figure = (text) => (tier.absent ? "–" : text());
  const on = tier.writes_off ? `on, but not written to: ${tier.writes_off}` : "on";
  const [read, written] = tierRates.get(tier.name) ?? [0, 0];
  return [
    ["Tier", tier.name], ["State", tier.off ? (tier.absent ? tier.off : `off: ${tier.off}`) : on],
    ["Asked for", figure(() => count(tier.blocks_looked_up ?? 0)), "n"], ["Had", figure(() => ratio(tier.blocks_found ?? 0, tier.blocks_looked_up ?? 0)), "n"],
    ["Read", figure(() => size(tier.bytes_brought ?? 0)), "n"], ["Reads", figure(() => `${size(read)}/s`), "n"],
    ["Written", figure(() => size(tier.bytes_written ?? 0)), "n"], ["Writes", figure(() => `${size(written)}/s`), "n"],
  ];
}

function showHost(host) {
  if (!host) return;
  const meter = (name, { used, total }, style) => ({ name, share: used / total, value: `${size(used)} of ${size(total)}`, style });
  bars("host", [
    { name: "processors", share: host.cpu.share, value: `${Math.round(100 * host.cpu.share)} % of ${host.cpu.cores}, load ${host.cpu.load.toFixed(2)}`, style: "a" },
    meter("memory", host.memory, "a"), ...(host.swap.total ? [meter("swap", host.swap, "b")] : []),
    ...host.disks.map((disk) => meter(disk.name === "region" ? `region, ${disk.path}` : `disk, ${disk.path}`, disk, "c")),
    ...host.devices.map((device) => meter(`device ${device.name}`, device, "d")),
  ]);
  tell(id("host-more"), host.no_devices ? `Device memory: ${host.no_devices}.` : "");
}

// Actions. Each explains what it does before it is done.

function clearOf(space) {
  return () => confirm({
    title: space ? `Clear ${space.model}?` : "Clear every namespace?",
    body: [
      say(space ? `The ${count(space.blocks)} blocks (${size(space.bytes)}) of namespace ${space.id} are forgotten, except those that an engine is reading or writing right now.`
        : `All ${count(data.status.pool.blocks)} blocks of ${plural(data.status.namespaces.length, "namespace")} are forgotten, except those that an engine is reading or writing right now.`),
      say("No request fails; prompts that would have been hits are computed again. This cannot be undone."),
    ],
    yes: "Clear",
    danger: true,
    act: async () => {
      const { blocks } = await ask("POST", "/api/v1/clear", { namespace: space ? space.id : "" });
      toast(`${count(blocks)} blocks were cleared.`);
    },
  });
}

function setLevel() {
  const level = id("level").value, now = data.status.daemon.log_level;
  id("level").value = now; // until it is changed
  if (level === now) return;
  confirm({
    title: `Set the log level to ${level}?`,
    body: [say(`The log level is ${now}; it will be ${level} until the daemon's next start.${level === "debug" ? " That logs much more, and takes time from the loop that serves engines." : ""}`)],
    yes: "Change",
    act: async () => {
      const answer = await ask("POST", "/api/v1/log-level", { level });
      toast(`The log level is now ${answer.level}, was ${answer.before}.`);
    },
  });
}

function fenceOff(session) {
  return () => confirm({
    title: `Fence off session ${session.id}?`,
    body: [
      say(`Session ${session.id} of ${session.engine} is away, and keeps the slots of ${plural(session.reservations, "save")} that its process may still be writing. These slots are released.`),
      say("Only for a process that is stuck and will never write again: anything it still writes corrupts others' blocks, and engines compute wrong answers."),
    ],
    yes: "Fence off",
    danger: true,
    act: async () => {
      const { reservations } = await ask("POST", `/api/v1/sessions/${session.id}/fence-off`);
      toast(`Session ${session.id} is fenced off: ${plural(reservations, "save")} ended.`);
    },
  });
}

id("clear-all").addEventListener("click", () => clearOf(null)());
id("level").addEventListener("change", setLevel);
document.querySelectorAll("[data-span]").forEach((button) => button.addEventListener("click", () => {
  span = Number(button.dataset.span);
  document.querySelectorAll("[data-span]").forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
  drawCharts();
}));
new ResizeObserver(drawCharts).observe(id("main"));

// The next request follows the answer to this one; there are none while the page is hidden.
async function run() {
  if (!document.hidden) await refresh();
  setTimeout(run, EVERY);
}
document.addEventListener("visibilitychange", () => document.hidden || refresh());
run();
