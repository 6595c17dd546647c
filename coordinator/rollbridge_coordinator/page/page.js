"use strict";
/* Draws the live page from its JSON, and asks again as long as somebody looks. Whatever a name, a label or an error says
   becomes text, never markup: nodes are made one by one, and the page's policy forbids anything else. */

const OVERVIEW_MS = 2000, STREAM_MS = 3000, HOUR_MS = 10000, DOCTOR_MS = 5000, LATE_MS = 2000;
const TOKEN = "rollbridge-token", LONG = 160, WRONG_MAX = 5;
const SVG = "http://www.w3.org/2000/svg";

const by = (id) => document.getElementById(id);
const state = { overview: null, group: null, groupDocument: null, stream: null, streamDocument: null, unlocked: false };

// Texts

const number = (value, digits = 0) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });
const rate = (value) => (value === null || value === undefined ? "–" : number(value, value < 10 ? 2 : value < 100 ? 1 : 0));

function size(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (value >= 1024 && step < units.length - 1) { value /= 1024; step += 1; }
  return `${number(value, step && value < 10 ? 1 : 0)} ${units[step]}`;
}

function time(ms) {
  if (ms === null || ms === undefined) return "–";
  if (Math.abs(ms) < 1000) return `${number(ms, Math.abs(ms) < 10 ? 1 : 0)} ms`;
  const sign = ms < 0 ? "−" : "", seconds = Math.abs(ms) / 1000;
  if (seconds < 60) return `${sign}${number(seconds, seconds < 10 ? 1 : 0)} s`;
  const whole = Math.floor(seconds), parts = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = parts.findIndex(([, length]) => whole >= length);
  const [unit, length] = parts[first], [next, shorter] = parts[first + 1];
  return `${sign}${Math.floor(whole / length)} ${unit} ${Math.floor((whole % length) / shorter)} ${next}`;
}

const clock = (ms) => (ms === null || ms === undefined ? "–" : new Date(ms).toISOString().slice(11, 19));
const moment = (ms) => (ms === null || ms === undefined ? "–" : new Date(ms).toISOString().slice(0, 19).replace("T", " "));
const several = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const left = (ms) => (ms === null || ms === undefined ? "–" : ms < 0 ? `over for ${time(-ms)}` : time(ms));
const streamsOf = (item) => item.streams.join(", ") + (item.more_streams ? ` and ${item.more_streams} more` : "");

// Nodes

function node(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function say(element, text) { if (element.textContent !== text) element.textContent = text; }

function notice(text, isProblem = false) {
  say(by("notice"), text);
  by("notice").classList.toggle("problem", isProblem);
}

function webAddress(text) {
  /* A link to another page comes from what another coordinator says of itself. */
  try {
    const url = new URL(text);
    return url.protocol === "http:" || url.protocol === "https:" ? url.href : null;
  } catch { return null; }
}

/* A cell is a text, or {text, href, kind, share, buttons}. Cells that stay the same are left alone, and so is whatever
   has the focus in them. */
function paint(cell, value, row) {
  const given = typeof value === "object" && value !== null ? value : { text: value };
  if (given.kind) cell.className = given.kind;
  if (given.title) cell.title = given.title;
  if (given.buttons) {
    if (!cell.firstElementChild) {
      const box = cell.appendChild(node("div", "", { class: "buttons" }));
      for (const { label, name, run } of given.buttons) {
        const button = box.appendChild(node("button", label, { type: "button", "aria-label": name }));
        button.addEventListener("click", () => run(row.data));
      }
    }
    cell.firstElementChild.hidden = given.hidden;
  } else if (given.href) {
    const link = cell.firstElementChild || cell.appendChild(node("a"));
    say(link, given.text);
    if (link.getAttribute("href") !== given.href) link.setAttribute("href", given.href);
  } else if ("share" in given) {
    const bar = cell.firstElementChild || cell.appendChild(node("span", "", { class: "share", role: "img" }));
    const inner = bar.firstElementChild || bar.appendChild(node("i"));
    inner.style.width = `${Math.round(100 * given.share)}%`;
    bar.setAttribute("aria-label", given.text);
  } else if (cell.firstElementChild) {
    cell.textContent = given.text;
  } else {
    say(cell, given.text);
  }
}

function fill(table, rows) {
  const body = by(table).tBodies[0], known = new Map();
  const wanted = new Set(rows.map((row) => row.key));
  for (const line of [...body.rows]) {
    if (wanted.has(line.dataset.key)) known.set(line.dataset.key, line); else line.remove();
  }
  rows.forEach((row, index) => {
    let line = known.get(row.key);
    if (!line) {
      line = node("tr", "", { "data-key": row.key });
      line.row = {};
      row.cells.forEach((_, column) => line.append(column ? node("td") : node("th", "", { scope: "row" })));
    }
    line.row.data = row.data;
    line.classList.toggle("is-selected", Boolean(row.selected));
    row.cells.forEach((cell, column) => paint(line.cells[column], cell, line.row));
    if (body.rows[index] !== line) body.insertBefore(line, body.rows[index] || null);
  });
  by(table).closest(".wide").hidden = rows.length === 0;
}

const n = (text) => ({ text, kind: "n" });
const words = (text) => ({ text: text.length > LONG ? `${text.slice(0, LONG)}…` : text, title: text.length > LONG ? text : "", kind: "text" });

// Asking

/* What is not visible is replaced, as in logs: controls, and characters that turn the direction of writing. */
const printable = (text) => text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, "\u{fffd}");

async function ask(path, body) {
  const options = { cache: "no-store", credentials: "omit", headers: {} };
  if (body !== undefined) {
    options.method = "POST";
    options.headers = { "Content-Type": "application/json", Authorization: `Bearer ${sessionStorage.getItem(TOKEN) || ""}` };
    options.body = JSON.stringify(body);
  }
  const answer = await fetch(`api/v1/${path}`, options);
  const document = JSON.parse(await answer.text(), (_, value) => (typeof value === "string" ? printable(value) : value));
  if (!answer.ok) throw Object.assign(new Error(document.error.message), { code: document.error.code });
  return document;
}

const path = (name) => name.split("/").map(encodeURIComponent).join("/");

// The overview

function showOverview(found) {
  state.overview = found;
  const mine = found.coordinator;
  say(by("where"), `coordinator ${mine.name}${mine.release ? `, release ${mine.release}` : ""}, as of ${clock(found.now_ms)}`);
  const wrong = [
    ...mine.faults,
    ...found.coordinators.flatMap((item) => (item.here ? [] : item.faults.map((fault) => `coordinator ${item.name} ${fault}`))),
    ...found.groups.filter((item) => item.fault).map((item) => `group ${item.group}: ${item.fault}`),
    ...found.groups.filter((item) => item.streams_in_error)
      .map((item) => `group ${item.group}: ${several(item.streams_in_error, "stream")} in error`),
  ];
  say(by("health"), wrong.length ? wrong.slice(0, WRONG_MAX).join("; ") + (wrong.length > WRONG_MAX ? `; and ${wrong.length - WRONG_MAX} more` : "") : "healthy");
  by("health").className = wrong.length ? "problem" : "good";
  document.title = `${wrong.length ? "⚠ " : ""}rollbridge – ${mine.name}`;
  by("groups-none").hidden = found.groups.length > 0 || Boolean(found.fault);
  fill("groups", found.groups.map((item) => ({
    key: item.group,
    data: item,
    selected: item.group === state.group,
    cells: [
      { text: item.group, href: `#/group/${path(item.group)}` },
      leaderCell(item),
      n(item.streams_in_error ? `${number(item.streams)}, ${number(item.streams_in_error)} in error` : number(item.streams)),
      n(number(item.open_transactions)), n(time(item.oldest_age_ms)), n(left(item.least_lease_left_ms)),
      n(rate(item.commits_per_s)), n(size(item.bytes_per_s)),
      n(time(item.commit_latency_p50_ms)), n(time(item.commit_latency_p99_ms)),
      lagCell(item), n(number(item.waiting_changes)),
    ],
  })));
  say(by("groups-more"), found.groups_not_listed ? `${several(found.groups_not_listed, "more group")} not listed.` : "");
  const list = by("coordinators");
  const lines = found.coordinators.map((item) => {
    const line = node("li", `${item.name}${item.release ? `, release ${item.release}` : ""}${item.here ? ", this one" : ""}`);
    const address = item.here ? null : webAddress(item.page);
    if (address) line.append(" – ", node("a", `the page of ${item.name}`, { href: address, rel: "noreferrer" }));
    return line;
  });
  if (list.textContent !== lines.map((line) => line.textContent).join("")) list.replaceChildren(...lines);
  by("gateways-section").hidden = found.gateways.length === 0;
  fill("gateways", found.gateways.map((item) => ({
    key: item.name, data: item,
    cells: [words(item.name), words(`${item.address}${item.encrypted ? ", TLS" : ""}`), item.release || "–",
      moment(item.since_ms), n(number(item.brokers)),
      item.lacking_rights ? { text: `${number(item.lacking_rights)} lacking`, kind: "problem" } : { text: "all", kind: "text" }],
  })));
  say(by("gateways-more"), found.gateways_not_listed ? `${several(found.gateways_not_listed, "more gateway")} not listed.` : "");
  if (found.fault) notice(found.fault, true);
  else if (by("notice").classList.contains("problem")) notice("");
  by("unlock").hidden = !mine.actions || state.unlocked;
  by("lock").hidden = !mine.actions || !state.unlocked;
}

/* What is not read yet is not counted while a broker gives nothing: then only the time says it. */
function lagCell(item) {
  const late = item.lag_ms >= LATE_MS;
  return { text: number(item.lag_messages) + (late ? `, for ${time(item.lag_ms)}` : ""), kind: late ? "n warning" : "n" };
}

function leaderCell(item) {
  if (item.fault) return { text: item.fault, kind: "text problem" };
  return { text: `${item.leader}${item.here ? ", here" : ""}${item.serving ? "" : ", taking over"}`, kind: "" };
}

// A group

const TRANSACTION_HEAD = [
  ["Transaction", "id"], ["State", ""], ["Client", ""], ["Label", ""], ["Age", "n"], ["Lease left", "n"],
  ["Size", "n"], ["Frames", "n"], ["Streams", ""], ["Actions", ""],
];

/* Of a producer at a gateway the transactional id says more than the client name that was made of it. */
function clientCell(item) {
  if (!item.through_gateway) return words(item.client);
  const served = item.gateway === null ? "" : item.gateway ? `, at gateway ${item.gateway}` : ", no gateway serves it";
  return words(`${item.transactional_id || item.client}${served}`);
}

function transactionRows(list) {
  return list.map((item) => ({
    key: item.transaction,
    data: item,
    cells: [
      { text: item.transaction, kind: "id" }, item.state, clientCell(item), words(item.label), n(time(item.age_ms)),
      { text: left(item.lease_left_ms), kind: item.lease_left_ms < 0 && item.state === "open" ? "n warning" : "n" },
      n(size(item.bytes)), n(number(item.frames)), words(streamsOf(item)),
      {
        hidden: !state.unlocked || item.state !== "open",
        buttons: [
          { label: "Abort…", name: `Abort transaction ${item.transaction}…`, run: abort },
          { label: "Extend…", name: `Extend the lease of transaction ${item.transaction}…`, run: extend },
        ],
      },
    ],
  }));
}

function showGroup(found) {
  state.groupDocument = found;
  by("group").hidden = false;
  say(by("group-title"), `Group ${found.group}`);
  const lead = by("group-lead"), address = found.here ? null : webAddress(found.page);
  lead.className = found.fault ? "problem" : "";
  const who = found.fault ? `Error: ${found.fault}.`
    : found.here ? `Led here since ${moment(found.since_ms)}, controller epoch ${found.controller_epoch}, as of ${clock(found.now_ms)}.`
    : `Led by coordinator ${found.leader} since ${moment(found.since_ms)}. This one knows only what ZooKeeper says; `
      + (address ? "more is on " : "its own page, if it has one, shows more.");
  if (lead.dataset.said !== who + address) {
    lead.dataset.said = who + address;
    lead.replaceChildren(who);
    if (address) lead.append(node("a", "its page", { href: address, rel: "noreferrer" }), ".");
  }
  const open = found.transactions, states = Object.entries(open.states).map(([name, count]) => `${number(count)} ${name}`);
  say(by("open-about"), open.count === 0 ? "None is open."
    : `${number(open.count)}${open.bytes === null ? "" : `, ${size(open.bytes)}`}${states.length ? ` (${states.join(", ")})` : ""}`
      + `${open.not_listed ? `; ${number(open.not_listed)} of them are not listed` : ""}`
      + `${open.source === "zookeeper" ? "; those of the last half second, and sizes, only their leader knows" : ""}.`);
  by("open-tables").hidden = open.count === 0;
  for (const [id, list] of [["oldest", open.oldest], ["largest", open.largest]]) {
    fill(id, transactionRows(list));
    by(id).classList.toggle("is-locked", !state.unlocked);
    by(`${id}-title`).hidden = list.length === 0;
  }
  fill("waiting", found.waiting.map((item, index) => ({
    key: `${index}`, data: item,
    cells: [item.kind, words([item.name, ...item.streams.filter((name) => name !== item.name)].filter(Boolean).join(", ") || "–"),
      item.cause, n(item.since_ms ? time(found.now_ms - item.since_ms) : "–"), words(item.waits_for.join("; ") || "–"),
      words(item.bound)],
  })));
  by("waiting-title").hidden = found.waiting.length === 0;
  const stray = found.foreign;
  by("foreign").hidden = !stray;
  say(by("foreign"), !stray ? "" : `Somebody who is no client writes into buffers: ${several(stray.messages, "message")} that are no frames. The last one `
    + `is at offset ${number(stray.offset)} of ${stray.topic}-${stray.partition}, of ${moment(stray.at_ms)}: key ${stray.key || "–"}, value ${stray.value || "–"}`);
  say(by("streams-more"), found.streams_not_listed ? `${several(found.streams_not_listed, "stream")} with less to do not listed.` : "");
  fill("streams", found.streams.map((item) => ({
    key: item.stream, data: item, selected: item.stream === state.stream,
    cells: [
      { text: item.stream, href: `#/stream/${path(item.stream)}` },
      item.fault ? { text: `error ${item.fault.code}: ${item.fault.reason}`, kind: "text problem" }
        : { text: item.topic ? `${item.state}, topic ${item.topic}` : item.state, kind: "text" },
      n(number(item.epoch)), n(number(item.segments)), n(number(item.open_transactions)), n(size(item.open_bytes)),
      n(rate(item.committed_records_per_s)), n(size(item.committed_bytes_per_s)), lagCell(item),
      n(size(item.held_bytes)),
    ],
  })));
  fill("rounds", found.rounds.map((item) => ({
    key: `${item.at_ms} ${item.path} ${item.transactions} ${item.records} ${item.bytes}`, data: item,
    cells: [clock(item.at_ms), item.path, n(number(item.transactions)), n(number(item.aborted)), n(number(item.records)),
      n(size(item.bytes)), n(time(item.waited_ms)), words(streamsOf(item))],
  })));
  by("rounds-title").hidden = found.rounds.length === 0;
}

// The last hour

const CHARTS = [
  { title: "Commits/s", text: rate, lines: [["", "commits_per_s"]] },
  { title: "Records/s", text: rate, lines: [["", "records_per_s"]] },
  { title: "Bytes/s", text: size, lines: [["", "bytes_per_s"]] },
  { title: "Commit latency", text: time, lines: [["p50", "commit_latency_p50_ms"], ["p99", "commit_latency_p99_ms"]] },
];
const WIDTH = 600, HEIGHT = 100, SHORTEST_MS = 300000, HOUR = 3600000;

function showHour(found) {
  const points = found.points;
  by("hour-none").hidden = points.length > 0;
  by("hour").hidden = points.length === 0;
  const box = by("hour"), first = points.length ? points[0].at_ms - points[0].ms : found.now_ms;
  const span = Math.min(Math.max(found.now_ms - first, SHORTEST_MS), HOUR);
  CHARTS.forEach((chart, index) => {
    const figure = box.children[index] || box.appendChild(newFigure(chart));
    const values = chart.lines.flatMap(([, key]) => points.map((point) => point[key])).filter((value) => value !== null);
    const most = Math.max(...values, 0);
    const now = chart.lines.map(([name, key]) => {
      const last = points.length ? points[points.length - 1][key] : null;
      return `${name ? `${name} ` : ""}${chart.text(last)}`;
    });
    const about = `${chart.title}: ${now.join(", ")} now, ${chart.text(values.length ? most : null)} at most in the last ${Math.round(span / 60000)} min`;
    say(figure.querySelector("figcaption"), `${about}${chart.lines.length > 1 ? " (p99 dashed)" : ""}`);
    figure.querySelector("svg").setAttribute("aria-label", about);
    chart.lines.forEach(([, key], line) =>
      figure.querySelectorAll("path")[line].setAttribute("d", pathOf(points, key, most, found, span)));
  });
}

function newFigure(chart) {
  const figure = node("figure"), picture = document.createElementNS(SVG, "svg");
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("role", "img");
  const line = picture.appendChild(document.createElementNS(SVG, "line"));
  for (const [key, value] of [["x1", 0], ["x2", WIDTH], ["y1", HEIGHT - 1], ["y2", HEIGHT - 1]]) line.setAttribute(key, value);
  chart.lines.forEach((_, index) => {
    const made = picture.appendChild(document.createElementNS(SVG, "path"));
    if (index) made.setAttribute("class", "two");
  });
  figure.append(node("figcaption"), picture);
  return figure;
}

function pathOf(points, key, most, found, span) {
  const parts = [];
  let before = null;
  for (const point of points) {
    if (point[key] === null) { before = null; continue; }
    const x = Math.max(0, WIDTH * (1 - (found.now_ms - point.at_ms) / span));
    const y = 3 + (HEIGHT - 6) * (1 - (most ? point[key] / most : 0));
    const joins = before !== null && point.at_ms - before < 2.5 * found.step_ms;
    parts.push(joins ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${x.toFixed(1)} ${y.toFixed(1)}h1`);
    before = point.at_ms;
  }
  return parts.join("");
}

// A stream

function showStream(found) {
  state.streamDocument = found;
  by("stream").hidden = false;
  say(by("stream-title"), `Stream ${found.stream}`);
  say(by("stream-about"), `Epoch ${number(found.epoch)}, transactions begin against epoch ${number(found.reference_epoch)}; group ${found.group}`
    + `${found.topic ? `; it has adopted topic ${found.topic}` : ""}; ${found.state}`
    + `${found.fault ? ` ${found.fault.code}: ${found.fault.reason}` : ""}.`);
  by("stream-about").className = found.fault ? "problem" : "";
  say(by("segments-about"), [
    found.measured_ms === null ? "" : `Measured ${clock(found.measured_ms)}, plain and native writes included.`,
    found.measure_fault || "",
    found.segments_not_listed ? `${several(found.segments_not_listed, "segment")} not listed.` : "",
  ].filter(Boolean).join(" "));
  const whole = found.segments.reduce((sum, item) => sum + (item.offsets_per_s || 0), 0);
  fill("segments", found.segments.map((item) => {
    const share = whole ? (item.offsets_per_s || 0) / whole : 0;
    return {
      key: item.segment, data: item,
      cells: [item.segment, `${number(item.low, 4)} to ${number(item.high, 4)}`, n(rate(item.offsets_per_s)),
        { share, text: `${Math.round(100 * share)} %` }, n(size(item.bytes)), n(number(item.end_offset)),
        n(item.since_epoch === null ? "earlier" : number(item.since_epoch)),
        words(item.partition ? `${item.topic}, partition ${item.partition}` : item.topic)],
    };
  }));
  const picture = by("lineage"), key = `${found.epoch}.${found.measured_ms}`;
  if (picture.dataset.key !== `${found.stream} ${key}`) {
    picture.dataset.key = `${found.stream} ${key}`;
    picture.src = `api/v1/streams/${path(found.stream)}/lineage.svg?${key}`;
  }
  picture.alt = `Lineage of ${found.stream}: ${several(found.epochs.length, "epoch")} drawn, ${several(found.segments.length, "active segment")}; the tables say the same.`;
  fill("epochs", found.epochs.map((item) => ({
    key: `${item.epoch}`, data: item,
    cells: [n(number(item.epoch)), item.cause, n(number(item.reference_epoch)), n(number(item.segments)), moment(item.created_ms)],
  })));
  by("scale").hidden = !state.unlocked;
}

// The doctor

function showDoctor(found) {
  const when = found.looked_ms === null ? "It is looking for the first time." : `As of ${clock(found.looked_ms)}, it took ${time(found.took_ms)}.`;
  say(by("doctor-when"), found.fault ? `It could not look: ${found.fault.message}` : `${when}${found.looked_ms === null ? "" : ` ${found.findings.length ? several(found.findings.length, "finding") : "Nothing is wrong"}.`}`);
  const list = by("doctor"), key = JSON.stringify(found.findings);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  const isLess = (item) => (item.severity === "problem" ? 0 : 1);
  list.replaceChildren(...[...found.findings].sort((one, other) => isLess(one) - isLess(other)).map((item) => {
    const line = node("li", "", { class: item.severity === "problem" ? "is-problem" : "" });
    line.append(node("span", `${item.severity} ${item.check}: `, { class: item.severity }), item.what, node("br"), "To do: ", item.remedy);
    if (item.more) line.append(node("br"), `and ${several(item.more, "finding")} more of this kind.`);
    return line;
  }));
}

// Dialogs

/* Ask for confirmation. `fields` are labels with their inputs; `run` returns what was done, or throws why not. */
function confirm({ title, about, fields, verb, run }) {
  const dialog = by("dialog"), form = by("dialog-form"), before = document.activeElement;
  say(by("dialog-title"), title);
  say(by("dialog-about"), about);
  say(by("dialog-fault"), "");
  say(by("dialog-go"), verb);
  by("dialog-fields").replaceChildren(...fields);
  by("dialog-go").disabled = false;
  form.onsubmit = async (event) => {
    event.preventDefault();
    by("dialog-go").disabled = true;
    say(by("dialog-fault"), "");
    try {
      const done = await run();
      dialog.close();
      notice(done);
      by("notice").focus();
      again();
    } catch (fault) {
      say(by("dialog-fault"), fault.message);
      if (fault.code === "wrong-token") lock();
    } finally {
      by("dialog-go").disabled = false;
    }
  };
  by("dialog-cancel").onclick = () => { dialog.close(); if (before && before.isConnected) before.focus(); };
  dialog.showModal();
}

function field(label, attributes) {
  const box = node("label", label), input = box.appendChild(node("input", "", attributes));
  return [box, input];
}

function abort(item) {
  const [box, input] = field("Reason, which whoever waits for it is told", { maxlength: "200", autocomplete: "off" });
  input.value = "admin";
  confirm({
    title: "Abort a transaction",
    about: `Nothing of transaction ${item.transaction} will ever be visible. Client ${item.client}, label ${item.label || "–"}, open for ${time(item.age_ms)}, ${size(item.bytes)}.`,
    fields: [box],
    verb: "Abort it",
    run: async () => (await ask("actions/abort", { transaction: item.transaction, reason: input.value })).done,
  });
}

function extend(item) {
  const [box, input] = field("Hours from now on", { type: "number", min: "0.01", max: "8784", step: "any", required: "" });
  input.value = "1";
  confirm({
    title: "Extend a lease",
    about: `Transaction ${item.transaction} of client ${item.client}, label ${item.label || "–"}, may stay open for longer; ${left(item.lease_left_ms)} are left. A lease is never made shorter.`,
    fields: [box],
    verb: "Extend it",
    run: async () =>
      (await ask("actions/extend", { transaction: item.transaction, lease_ms: Math.round(Number(input.value) * 3600000) })).done,
  });
}

function scale() {
  const found = state.streamDocument, group = node("fieldset");
  group.append(node("legend", "Segments to seal"));
  const boxes = found.segments.map((item) => {
    const label = group.appendChild(node("label")), input = label.appendChild(node("input", "", { type: "checkbox" }));
    label.append(` ${item.segment}, keys ${number(item.low, 4)} to ${number(item.high, 4)}, ${rate(item.offsets_per_s)} offsets/s`);
    return [item.number, input];
  });
  const [box, into] = field("New segments in their place, of equal size", { type: "number", min: "1", max: "1000", step: "1", required: "" });
  into.value = "2";
  confirm({
    title: "Scale a stream",
    about: `The segments that you choose of ${found.stream} are sealed, and new ones take over their keys. They must lie side by side. Open transactions go on undisturbed.`,
    fields: [group, box],
    verb: "Scale it",
    run: async () => {
      const seal = boxes.filter(([, input]) => input.checked).map(([segment]) => segment);
      if (!seal.length) throw new Error("Choose one segment at least.");
      return (await ask("actions/scale", { stream: found.stream, seal, into: Number(into.value) })).done;
    },
  });
}

function unlock() {
  const [box, input] = field("Token (page_token of the coordinator)", { type: "password", autocomplete: "off", required: "" });
  confirm({
    title: "Unlock actions",
    about: "With the token this page aborts, extends and scales. It is kept for as long as this tab is open.",
    fields: [box],
    verb: "Unlock",
    run: async () => {
      sessionStorage.setItem(TOKEN, input.value);
      try {
        const { done } = await ask("actions/check", {});
        state.unlocked = true;
        return done;
      } catch (fault) {
        sessionStorage.removeItem(TOKEN);
        throw fault;
      }
    },
  });
}

function lock() {
  sessionStorage.removeItem(TOKEN);
  state.unlocked = false;
  again();
}

// What is looked at

function choose() {
  const [, kind, scope, name] = location.hash.split("/").map(decodeURIComponent);
  if (!scope || !name) return;
  if (kind === "group") Object.assign(state, { group: `${scope}/${name}`, stream: null });
  if (kind === "stream") Object.assign(state, { stream: `${scope}/${name}` });
  by("stream").hidden = true;
  again();
}

async function lookOver() {
  try {
    showOverview(await ask("overview"));
  } catch {
    notice(`The coordinator does not answer; what is shown is as of ${state.overview ? clock(state.overview.now_ms) : "never"}.`, true);
    return;
  }
  const groups = state.overview.groups;
  if (!state.group && groups.length) state.group = (groups.find((item) => item.here) || groups[0]).group;
  if (!state.group) return;
  const wanted = state.group;
  try {
    const found = await ask(`groups/${path(wanted)}`);
    if (wanted !== state.group) return;
    showGroup(found);
    if (!state.stream && found.streams.length) { state.stream = found.streams[0].stream; lookAtStream(); }
  } catch (fault) {
    by("group").hidden = true;
    notice(`${wanted}: ${fault.message}`, true);
  }
}

async function lookAtStream() {
  const wanted = state.stream;
  if (!wanted) { by("stream").hidden = true; return; }
  try {
    const found = await ask(`streams/${path(wanted)}`);
    if (wanted !== state.stream) return;
    if (state.group !== found.group) state.group = found.group;
    showStream(found);
  } catch (fault) {
    if (fault.code === "stream-not-found") { by("stream").hidden = true; state.stream = null; }
  }
}

async function lookBack() {
  if (!state.group) return;
  const wanted = state.group;
  try {
    const found = await ask(`groups/${path(wanted)}/last-hour`);
    if (wanted === state.group) showHour(found);
  } catch { /* the overview says so */ }
}

async function askDoctor() {
  try { showDoctor(await ask("doctor")); } catch { /* likewise */ }
}

const LOOKS = [[lookOver, OVERVIEW_MS], [lookAtStream, STREAM_MS], [lookBack, HOUR_MS], [askDoctor, DOCTOR_MS]];
const timers = new Map();

/* One look at a time of each kind, and none while nobody sees the page: leaders put up nothing then. */
async function keep(look, pauseMs) {
  clearTimeout(timers.get(look));
  const turn = {};
  keep.turns.set(look, turn);
  if (!document.hidden) await look();
  if (keep.turns.get(look) === turn) timers.set(look, setTimeout(keep, pauseMs, look, pauseMs));
}
keep.turns = new Map();

function again() { for (const [look, pauseMs] of LOOKS) keep(look, pauseMs); }

function start() {
  for (const id of ["oldest", "largest"]) {
    const line = by(id).tHead.appendChild(node("tr"));
    for (const [title, kind] of TRANSACTION_HEAD) line.append(node("th", title, { scope: "col", class: kind }));
  }
  state.unlocked = Boolean(sessionStorage.getItem(TOKEN));
  by("unlock").addEventListener("click", unlock);
  by("lock").addEventListener("click", lock);
  by("scale").addEventListener("click", scale);
  addEventListener("hashchange", choose);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) again(); });
  choose();
  again();
}

start();
