// The page in motion: searches without leaving it, keys, themes, tokens, and the figures as they change.
// Without this file everything that searches still works: each link and the form lead to a page of their own.

import {el, text} from "./draw.js";
import {Live, ask, json, keepSecret} from "./live.js";
import {showEvents, showFiles, showStatus} from "./panels.js";
import {duration, retime, useLocal, zoneOffset} from "./show.js";

const $ = (id) => document.getElementById(id);
const form = $("search");
const answer = $("answer");
const STALE_MS = 5000;
const FILES_MS = 15000;
const FILES_LEAST_MS = 2000;

const kept = (name, value) => {
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name);
  } catch { return null; }
};

// Theme and zone

const THEMES = ["auto", "light", "dark"];
const useTheme = (theme) => {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  text($("theme"), theme);
  kept("theme", theme);
};
const useZone = (zone) => {
  useLocal(zone === "local");
  text($("zone"), zone === "local" ? "local time" : "UTC");
  text($("zone-words"), zone === "local" ? `this browser's zone (${zoneOffset()})` : "UTC");
  $("zone-given").value = zone === "local" ? zoneOffset() : "";
  kept("zone", zone);
  retime(document);
};
$("theme").hidden = $("zone").hidden = false;
$("theme").addEventListener("click", () => useTheme(THEMES[(THEMES.indexOf($("theme").textContent) + 1) % THEMES.length]));
$("zone").addEventListener("click", () => useZone(kept("zone") === "local" ? "utc" : "local"));
useTheme(THEMES.includes(kept("theme")) ? kept("theme") : "auto");
useZone(kept("zone") === "local" ? "local" : "utc");

// The form shows the fields that its way of searching knows.

const fit = () => {
  const by = form.elements.by;
  form.querySelector(".of-topic").hidden = !form.dataset.ofTopic.split(" ").includes(by.value);
  form.querySelector(".of-index").hidden = !form.dataset.ofIndex.split(" ").includes(by.value);
  text(form.querySelector(".more > span"), by.selectedOptions[0].textContent);
};
form.elements.by.addEventListener("change", fit);
fit();

// Topics whose names begin as what is typed; where they cannot be had, the field is as it was.

let topicsAsked;
const complete = async () => {
  const begin = form.elements.topic.value;
  if (begin === topicsAsked || $("link").dataset.link === "refused") return;
  topicsAsked = begin;
  try {
    const found = await json(`/api/v1/topics?${new URLSearchParams({begin: begin.slice(0, 255)})}`);
    if (begin === topicsAsked) $("topics").replaceChildren(...found.topics.map((value) => el("option", {value})));
  } catch { topicsAsked = undefined; }
};
for (const name of ["focus", "input"]) form.elements.topic.addEventListener(name, complete);

const address = () => {
  const given = [...new FormData(form)].filter(([name, value]) => value !== "" && `${name}=${value}` !== "mode=exact");
  return `?${new URLSearchParams(given)}`;
};
const fill = () => {
  const given = new URLSearchParams(location.search);
  for (const field of form.elements) {
    if (!field.name || field.type === "hidden") continue;
    field.value = given.get(field.name) ?? (field.tagName === "SELECT" ? field.options[0].value : "");
  }
  fit();
};

// Answers: the server's page of the same address, of which the part that differs is taken over.

const panel = (title, words) => el("div", {class: "panel bad", role: "alert"}, el("h2", {}, title), el("p", {}, words));
const isOpen = () => $("link").dataset.link !== "refused";

const fetched = async (href) => {
  let response;
  try {
    response = await ask(`/${href}`, {headers: {accept: "text/html"}, signal: AbortSignal.timeout(60000)});
  } catch {
    return panel("The daemon does not answer", "Is it running? systemctl status indexd tells; then search again.");
  }
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const found = page.getElementById("answer");
  if (!found) return panel(`The server answered ${response.status}`, "Reload the page; the daemon's log may say more.");
  for (const part of ["h1", ".where-from"]) document.querySelector(part).replaceChildren(...page.querySelector(part).childNodes);
  document.title = page.title;
  retime(found);
  const nodes = document.createDocumentFragment();
  nodes.append(...found.childNodes);
  return nodes;
};

let turn = 0;
const load = async (href, focus = true) => {
  const mine = ++turn;
  answer.setAttribute("aria-busy", "true");
  const nodes = await fetched(href);
  if (mine !== turn) return;
  answer.replaceChildren(nodes);
  answer.removeAttribute("aria-busy");
  if (focus) (answer.querySelector("a.open") || answer).focus({preventScroll: true});
};
const go = (href) => {
  history.pushState(null, "", `/${href}`);
  fill();
  return load(href);
};

form.addEventListener("submit", (event) => {
  event.preventDefault();
  go(address());
});
addEventListener("popstate", () => {
  fill();
  if (location.search) load(location.search, false);
  else answer.replaceChildren();
});

// Hits: one can be opened below its row.

const rows = () => [...answer.querySelectorAll("tr.hit")];
const close = (row) => {
  if (!row.classList.contains("is-open")) return;
  row.classList.remove("is-open");
  row.querySelector("a.open").setAttribute("aria-expanded", "false");
  row.nextElementSibling.remove();
};
const open = async (row) => {
  if (row.classList.contains("is-open")) return close(row);
  const link = row.querySelector("a.open");
  const place = el("td", {colspan: row.children.length}, el("p", {class: "soft"}, "…"));
  row.classList.add("is-open");
  link.setAttribute("aria-expanded", "true");
  row.after(el("tr", {class: "opened"}, place));
  place.replaceChildren(await fetched(link.getAttribute("href")));
};

answer.addEventListener("click", async (event) => {
  if (event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const link = event.target.closest("a[href^='?']");
  const row = event.target.closest("tr.hit");
  if (!link && row && !getSelection().toString()) open(row);
  if (!link) return;
  event.preventDefault();
  if (link.classList.contains("open")) open(row);
  else if (link.classList.contains("view")) {
    const nodes = await fetched(link.getAttribute("href"));
    const article = link.closest("article") || answer;
    const words = link.textContent;
    const next = nodes.querySelector("article") || nodes;
    article.replaceWith(next);
    const same = next.querySelectorAll && [...next.querySelectorAll("a.view")].find((one) => one.textContent === words);
    if (same) same.focus();
  } else go(link.getAttribute("href"));
});

// Keys

const move = (step) => {
  const links = rows().map((row) => row.querySelector("a.open"));
  if (!links.length) return;
  const at = links.indexOf(document.activeElement.closest("tr.hit")?.querySelector("a.open"));
  const next = links[Math.min(Math.max(at + step, 0), links.length - 1)];
  next.focus();
  next.closest("tr").scrollIntoView({block: "nearest"});
};
const escape = () => {
  const opened = rows().filter((row) => row.classList.contains("is-open"));
  const inside = document.activeElement.closest("tr.opened")?.previousElementSibling;
  const row = inside || opened.find((one) => one.contains(document.activeElement)) || opened[opened.length - 1];
  if (!row) return document.activeElement.blur();
  close(row);
  row.querySelector("a.open").focus();
};
document.addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "Escape") return escape();
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const steps = {j: 1, ArrowDown: 1, k: -1, ArrowUp: -1};
  const isInText = event.target.closest("pre, .opened") && event.key.startsWith("Arrow");
  if (event.key === "/") {
    event.preventDefault();
    form.elements.q.focus();
    form.elements.q.select();
  } else if (steps[event.key] && rows().length && !isInText) {
    event.preventDefault();
    move(steps[event.key]);
  }
});

// Token

$("token").addEventListener("submit", (event) => {
  event.preventDefault();
  keepSecret($("secret").value);
  $("secret").value = "";
  $("token").hidden = true;
  live.retry();
  if (location.search) load(location.search, false);
  else fetched("");
});

// Figures

let seen = {files: 0, filesOf: null, events: -1, boot: null};
const showLink = (link) => {
  const age = live.heard ? Date.now() - live.heard : 0;
  const isStale = link === "stale" || (link !== "refused" && live.heard && age > STALE_MS && !document.hidden);
  const words = {live: "live", polling: "every 2 s", refused: "token needed"}[link] || "";
  $("link").hidden = false;
  $("link").dataset.link = isStale ? "stale" : link;
  text($("link"), isStale ? `stale: no answer for ${duration(Math.max(Math.floor(age / 1000), 1) * 1000)}` : words);
  document.body.classList.toggle("is-stale", Boolean(isStale));
  if (link === "refused") $("token").hidden = false;
};

// What is asked for only when it has changed; what cannot be had now is asked for again with a later status.
const showMore = async (row) => {
  if (row.bootId !== seen.boot) seen = {files: 0, filesOf: null, events: -1, boot: row.bootId};
  const mine = seen;
  const [events, filesOf, now] = [Number(row.lastEvent || 0), String(row.indexFiles), Date.now()];
  if (events !== mine.events) {
    mine.events = events;
    json(`/api/v1/events?since=${Math.max(events - 50, 0)}`).then((found) => showEvents(found.events), () => { mine.events = -1; });
  }
  if (row.phase === "running" && (filesOf !== mine.filesOf ? now - mine.files > FILES_LEAST_MS : now - mine.files > FILES_MS)) {
    mine.files = now;
    json("/api/v1/index-files").then((found) => { mine.filesOf = filesOf; showFiles(found.indexFiles); }, () => {});
  }
};

const live = new Live({
  row: (row) => { showStatus(row); showMore(row); },
  link: showLink,
});
setInterval(() => { if (live.heard && isOpen()) showLink($("link").dataset.link === "stale" ? "stale" : $("link").dataset.link || "live"); }, 1000);
live.run();
if (location.search && !answer.childElementCount) load(location.search, false);
document.documentElement.dataset.ready = "yes";
