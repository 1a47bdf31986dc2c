// What a status says, drawn: state, problems, figures, the log, index files, events.

import {bars, curve, el, percent, put, strip, svg, text} from "./draw.js";
import {amount, big, clock, duration, group, least, most, share, size, stamp} from "./show.js";

const SPAN_MS = 300000;
const SPAN_LEAST_MS = 60000;
const RATE_MS = 10000;
const BEHIND_MS_MAX = 60000;
const EVENTS_SHOWN = 8;
const FILES_SHOWN = 200;
const $ = (id) => document.getElementById(id);
const number = (value) => (value === null || value === undefined ? null : Number(value));

// Figures of the last minutes, for curves and rates.
class History {
  constructor() { this.points = []; this.boot = null; }

  add(row) {
    if (row.bootId !== this.boot) { this.points = []; this.boot = row.bootId; }
    const at = Date.now();
    const point = {
      at, behind: number(row.dispatchBehindBytes), lag: number(row.dispatchBehindMilliseconds),
      messages: number(row.messages), read: number(row.readBytesTotal ?? row.readOffset),
    };
    const before = this.points.find((one) => one.at >= at - RATE_MS && one.messages !== null) || point;
    const seconds = (at - before.at) / 1000;
    const rate = (name) => (seconds < 0.5 || point[name] === null ? null : Math.max(0, (point[name] - before[name]) / seconds));
    point.messageRate = rate("messages");
    point.readRate = rate("read");
    this.points.push(point);
    this.points = this.points.filter((one) => one.at >= at - SPAN_MS);
    return point;
  }

  // It begins with a minute and grows.
  get span() { return Math.min(Math.max(Date.now() - (this.points[0]?.at ?? 0), SPAN_LEAST_MS), SPAN_MS); }

  of(name) { return this.points.map((point) => ({at: point.at, value: point[name]})); }
}

const history = new History();

const CURVES = [
  ["lag", "lag", "behind the newest message", duration],
  ["behind", "behind", "of log not indexed yet", size],
  ["messageRate", "messages", "messages a second", amount],
  ["readRate", "read", "of log read a second", size],
];

const FIGURES = [
  ["durable", "not durable yet", (row) => [size(most(big(row.phyOffset) - big(row.durableOffset), 0n)),
    row.lastFlushMilliseconds === undefined ? "" : `last flush took ${duration(row.lastFlushMilliseconds)}`]],
  ["entries", "index entries", (row) => [amount(number(row.indexEntries)),
    `${counted(Number(row.indexFiles), "file", "files")}${row.rollOvers === undefined ? "" : `, ${group(row.rollOvers)} rolled over`}`]],
  ["queue", "messages wait for the next drain", (row) => (row.queueRows === undefined ? null : [amount(number(row.queueRows)),
    `${size(row.queueBytes)}, the oldest ${duration(row.queueOldestMilliseconds)}`])],
  ["holes", "of log not findable", (row) => {
    const bytes = row.uncoveredBytes === undefined ? holesOf(row).reduce((sum, hole) => sum + hole.end - hole.begin, 0n) : big(row.uncoveredBytes);
    return [size(bytes), `${size(row.corruptBytes || 0)} unreadable`, bytes > 0n ? "bad" : ""];
  }],
  ["broker", "broker", (row) => brokerOf(row.broker || {}, row.mode)],
  ["disk", "of the data's disk used", (row) => (number(row.diskUsedRatio) === null ? null
    : [share(number(row.diskUsedRatio)), number(row.diskUsedMax) < 1 ? `indexing waits at ${share(number(row.diskUsedMax))}` : "",
      number(row.diskUsedRatio) >= number(row.diskUsedMax) ? "bad" : ""])],
  ["memory", "memory", (row) => (row.memoryBytes === undefined ? null : [size(row.memoryBytes), `pid ${row.pid}`])],
  ["since", "since it started", (row) => [duration(Math.max(Date.now() - Number(row.startedAt), 0)), `version ${row.version}`]],
];

const counted = (count, one, more) => `${group(count)} ${count === 1 ? one : more}`;

const brokerOf = (broker, mode) => {
  const indexing = broker.indexing === true ? "its own index is on" : broker.indexing === false ? "its own index is off" : "";
  const pid = broker.pid ? `pid ${broker.pid}` : "";
  const extra = [pid, indexing].filter(Boolean).join(", ");
  if (broker.alive === true) return ["alive", extra, "good"];
  if (broker.alive === false) return ["not running", extra || (mode === "offload" ? "why stands above" : broker.why || ""), mode === "offload" ? "bad" : ""];
  return ["not known", extra || broker.why || ""];
};

const holesOf = (row) => (row.uncovered || []).map((gap) => (Array.isArray(gap) ? gap : [gap.begin, gap.end, gap.reason]))
  .map(([begin, end, reason]) => ({begin: big(begin), end: big(end), words: `not indexed (${reason}): ${group(begin)} to ${group(end)}`}));

const tileOf = (id, hasCurve) => {
  const found = $(`tile-${id}`);
  if (found) return found;
  const tile = el("div", {id: `tile-${id}`, class: "tile"}, el("div", {class: "value"}), el("div", {class: "words"}),
    hasCurve ? el("div", {class: "plot"}) : null, el("div", {class: "extra"}));
  $("tiles").append(tile);
  return tile;
};

const setTile = (tile, value, words, extra, kind) => {
  text(tile.querySelector(".value"), value);
  text(tile.querySelector(".words"), words);
  text(tile.querySelector(".extra"), extra || "");
  tile.className = `tile ${kind || ""}`.trim();
};

const showTiles = (row) => {
  const point = history.add(row);
  if (row.phase !== "running") return;
  for (const [name, id, words, show] of CURVES) {
    const tile = tileOf(id, true);
    const highest = curve(tile.querySelector(".plot"), history.of(name), point.at, history.span);
    const isBad = name === "lag" && point.lag >= BEHIND_MS_MAX;
    setTile(tile, point[name] === null ? "-" : show(point[name]), words, highest === null ? "" : `at most ${show(highest)} in ${Math.ceil(history.span / 60000)} min`, isBad ? "bad" : "");
  }
  for (const [id, words, read] of FIGURES) {
    const found = read(row);
    if (found) setTile(tileOf(id, false), found[0], words, found[1], found[2]);
  }
};

const legend = (kind, words, detail) => el("li", {}, el("i", {class: `swatch ${kind}`}), el("span", {}, words), el("span", {class: "soft num"}, detail));

const lastStart = (row) => {
  const last = row.lastRecovery;
  const clean = row.lastShutdownClean === false ? "It was not stopped cleanly before this start. " : "";
  if (!last) return clean;
  const counts = [["keptEntries", "entries kept"], ["droppedEntries", "dropped"], ["rewrittenFiles", "files written anew"], ["deletedFiles", "removed"]]
    .filter(([name]) => Number(last[name] || 0) > 0).map(([name, words]) => `${group(last[name])} ${words}`);
  const words = [`${last.event} at ${clock(last.endedAt)} in ${duration(1000 * last.seconds)}`, ...counts, ...(last.reasons || [])];
  return `${clean}${words.join(", ").replace(/^./, (first) => first.toUpperCase())}.`;
};

const showLog = (row) => {
  if (row.phase !== "running" || row.phyOffset === undefined) return;
  const [first, low, durable, done, read] = [row.beginOffset, row.commitLogMinOffset, row.durableOffset, row.phyOffset, row.readOffset].map(big);
  const end = most(big(row.commitLogMaxOffset), read, done);
  const begin = least(first, low);
  const live = most(first, low);
  const expired = first < low;
  // What has expired is drawn as a twelfth at most: the log that is there is what matters.
  const from = expired ? most(begin, low - (end - low) / 12n) : begin;
  const at = (value) => most(value, from);
  const parts = [
    expired
      ? {kind: "expired", begin: from, end: low, words: `expired, ${size(low - begin)}`, detail: `${group(begin)} to ${group(low)}`}
      : {kind: "hole", begin: from, end: first, words: `before the index begins, ${size(first - begin)}`, detail: `${group(begin)} to ${group(first)}`},
    {kind: "durable", begin: live, end: at(durable), words: `indexed and durable, ${size(most(durable - live, 0n))}`, detail: `to ${group(durable)}`},
    {kind: "indexed", begin: at(most(durable, live)), end: at(done), words: `indexed, not durable yet, ${size(most(done - durable, 0n))}`, detail: `to ${group(done)}`},
    {kind: "waiting", begin: at(most(done, live)), end, words: `not indexed yet, ${size(end - done)}`, detail: `to ${group(end)}`},
  ];
  const holes = holesOf(row).filter((hole) => hole.end > from);
  const items = parts.filter((part) => part.end > part.begin || part.kind === "durable" || part.kind === "waiting")
    .map((part) => legend(part.kind, part.words, part.detail));
  const lost = holes.reduce((sum, hole) => sum + hole.end - hole.begin, 0n);
  if (holes.length) items.push(legend("hole", `${counted(holes.length, "hole", "holes")}, ${size(lost)}`, holes.slice(0, 3).map((hole) => hole.words.replace("not indexed ", "")).join("; ")));
  put($("log"), strip(parts, holes, from, end), el("ul", {class: "legend"}, items), lastStart(row) ? el("p", {class: "soft covered"}, lastStart(row)) : null);
  text($("log-size"), `${size(end - low)} from ${group(low)} to ${group(end)}`);
};

const OUTPUTS = {key: "keys", cq: "queues", sparse: "times"};

const showOutputs = (row) => {
  if (!row.outputs || !row.outputs.length) return;
  const head = el("tr", {}, ["Output", "Behind", "Not durable", "Files", "Entries", "Size", "Newest file"].map((words, column) =>
    el("th", {scope: "col", class: column ? (column === 2 || column > 4 ? "n wide" : "n") : null}, words)));
  const rows = row.outputs.map((one) => el("tr", {}, el("td", {}, OUTPUTS[one.output] || one.output),
    el("td", {class: "n"}, size(one.behindBytes || 0)), el("td", {class: "n wide"}, size(most(big(one.phyOffset) - big(one.durableOffset), 0n))), el("td", {class: "n"}, group(one.files ?? "-")),
    el("td", {class: "n"}, one.entries === undefined ? "-" : amount(Number(one.entries))), el("td", {class: "n wide"}, one.bytes === undefined ? "-" : size(one.bytes)),
    el("td", {class: "n wide"}, number(one.fillRatio) === null ? "-" : share(number(one.fillRatio)))));
  put($("outputs"), el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
};

const showRecovery = (row) => {
  const found = row.phase === "recovering" ? row.recovering : null;
  $("recovery").hidden = !found;
  if (!found) return;
  const [done, total] = [number(found.done), number(found.total)];
  const value = total ? done / total : 0;
  const isBytes = found.unit === "bytes";
  const show = isBytes ? size : group;
  const seconds = found.seconds;
  const left = value > 0.02 && seconds ? `, about ${duration(1000 * seconds * (1 - value) / value)} left` : "";
  const words = `${show(found.done)} of ${show(found.total)}${isBytes ? "" : ` ${found.unit || ""}`}${left}`;
  const drawn = svg("svg", {class: "progress", width: "100%", height: 10, role: "progressbar", "aria-valuenow": Math.round(100 * value),
    "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "Recovery"},
  svg("rect", {class: "empty", width: "100%", height: 10, rx: 3}), svg("rect", {class: "full", width: percent(value), height: 10, rx: 3}));
  put($("recovery"), el("div", {class: "bar"}, el("h2", {}, `Recovering: ${found.step}`), el("span", {class: "soft num"}, words)), drawn,
    el("p", {class: "soft"}, "What is on disk is compared with the log, and what is missing is read again. Searching begins when that is done."));
};

export const showStatus = (row) => {
  $("state").className = `verdict ${row.summary.kind}`;
  text($("state"), row.summary.words);
  put($("problems"), ...row.findings.map((problem) => el("li", {}, problem)));
  $("live").hidden = false;
  $("tiles").hidden = row.phase !== "running" && !$("tiles").childElementCount;
  showRecovery(row);
  showTiles(row);
  showLog(row);
  showOutputs(row);
  drawFiles(row);
};

const list = (value) => (value || []).join(", ");
const opened = (f) => `${group(f.kept_entries)} entries kept, ${group(f.dropped_entries)} dropped, in ${duration(1000 * f.seconds)}`
  + ((f.reasons || []).length ? `: ${list(f.reasons)}` : "");

// Each event of events.py: its class, its name and what it says, in words.
const EVENTS = {
  rolled: ["", "Index file full", (f) => `${counted(Number(f.files), "file", "files")}, at offset ${group(f.phy_offset)}`],
  flushed: ["", "Made durable", (f) => `up to offset ${group(f.phy_offset)}, in ${duration(1000 * f.seconds)}`],
  created: ["", "New index", opened],
  opened: ["", "Opened", opened],
  recovered: ["", "Recovered", opened],
  disturbed: ["bad", "Opened anew", (f) => f.problem],
  frontier_unreadable: ["bad", "Frontier unreadable", (f) => f.problem],
  restored: ["bad", "Files put back", (f) => list(f.names)],
  expired_files: ["", "Expired", (f) => `${counted(Number(f.files), "index file", "index files")} of log that is gone`],
  skipped: ["bad", "Passed over", (f) => `${size(f.bytes)} of log, from ${group(f.begin)} to ${group(f.end)}: ${f.reason}`],
  left_out: ["bad", "In no queue", (f) => f.reason],
  corrupt: ["bad", "Unreadable log", (f) => `at offset ${group(f.offset)}: ${f.reason}`],
  corrupt_left: ["good", "Readable again", (f) => `at offset ${group(f.offset)}`],
  degraded: ["bad", "Waiting", (f) => `${f.stage}: ${f.problem}`],
  healed: ["good", "Healed", (f) => `${f.stage} goes on`],
  state_not_written: ["bad", "State not written", (f) => f.problem],
  broker: ["", "Broker", (f) => {
    const [state, extra] = brokerOf(f);
    return extra ? `${state}, ${extra}` : state;
  }],
  broker_unsafe: ["bad", "Broker unsafe", (f) => list(f.texts)],
  stalled: ["bad", "Stalled", (f) => `${list(f.stages)} for ${duration(1000 * f.seconds)}`],
  moves_again: ["good", "Moves again", (f) => list(f.stages)],
  reloaded: ["", "Settings read", (f) => [list(f.changed) || "nothing changed", list(f.needs_restart) && `a restart is needed for ${list(f.needs_restart)}`].filter(Boolean).join("; ")],
  reload_refused: ["bad", "Settings refused", (f) => f.problem],
  stopping: ["", "Stopping", (f) => `by ${f.signal}`],
};

export const showEvents = (events) => {
  const shown = events.slice(-EVENTS_SHOWN).reverse();
  const items = shown.map((event) => {
    const fields = event.fields || {};
    const [kind, name, say] = EVENTS[event.name] || ["", event.name, () => ""];
    const all = Object.entries(fields).map(([field, value]) => `${field} ${typeof value === "object" ? JSON.stringify(value) : value}`);
    return el("li", {}, el("time", {"data-ms": event.at, "data-short": true, title: stamp(event.at)}, clock(event.at)),
      el("span", {class: `kind ${kind}`}, name), el("span", {class: "text soft", title: all.join("\n").slice(0, 2000)}, String(say(fields)).slice(0, 200)));
  });
  put($("events"), ...(items.length ? items : [el("li", {class: "soft"}, "Nothing has happened yet.")]));
};

let files = [];

// The header of the newest file is asked for now and then; how full it is comes with each status.
const drawFiles = (row) => {
  if (!files.length) return;
  const key = (row.outputs || []).find((one) => one.output === "key");
  const shown = files.slice(-FILES_SHOWN);
  const last = shown[shown.length - 1];
  if (key && key.fillRatio !== null && Number(key.files) === files.length) last.ratio = number(key.fillRatio);
  const words = files.length > shown.length ? `the newest ${shown.length} of ${group(files.length)}` : `${group(files.length)} of them`;
  text($("files-size"), `${words}, the newest ${share(last.ratio)} full`);
  put($("files"), bars(shown.map((file) => ({ratio: file.ratio, words: `${file.words}, ${share(file.ratio)} full`}))));
};

export const showFiles = (found) => {
  files = found.map((file) => ({
    ratio: number(file.fillRatio),
    words: `${file.name}: ${stamp(file.beginTimestamp)} to ${stamp(file.endTimestamp)}`,
  }));
  if (!files.length) put($("files"), el("p", {class: "soft"}, "There is none yet: the first message with a key makes it."));
};
