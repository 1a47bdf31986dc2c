// The daemon's figures, once a second while the page is looked at: by server-sent events, or asked for where those fail.

const SILENCE_MS = 5000;
const POLL_MS = 2000;
const RETRY_MS = [1000, 2000, 4000, 8000];
const POLLS_PER_TRY = 5;

const secret = () => { try { return sessionStorage.getItem("token"); } catch { return null; } };
export const keepSecret = (value) => { try { sessionStorage.setItem("token", value); } catch { /* for this page only, then */ } };

// A request with the token, where there is one.
export const ask = (path, settings = {}) => {
  const token = secret();
  const headers = {...(settings.headers || {}), ...(token ? {authorization: `Bearer ${token}`} : {})};
  return fetch(path, {...settings, headers, cache: "no-store", credentials: "same-origin"});
};

export class Refused extends Error {}

const must = (response) => {
  if (response.status === 401 || response.status === 403) throw new Refused("a token is needed");
  if (!response.ok) throw new Error(`HTTP ${response.status}`);
  return response;
};

export const json = async (path, settings) => must(await ask(path, settings)).json();
const pause = (millis) => new Promise((done) => { setTimeout(done, millis); });

const lines = (event) => event.split(/\r\n|\n|\r/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");

export class Live {
  // told: {row(row), link("live" | "polling" | "stale" | "refused")}
  constructor(told) {
    this.told = told;
    this.heard = 0;
    this.failures = 0;
    this.isRefused = false;
    this.resume = () => {};
    document.addEventListener("visibilitychange", () => this.resume());
  }

  retry() {
    this.isRefused = false;
    this.failures = 0;
    this.resume();
  }

  async run() {
    for (;;) {
      if (document.hidden || this.isRefused) {
        await new Promise((done) => { this.resume = done; });
        continue;
      }
      try {
        await this.stream();
      } catch (problem) {
        if (document.hidden) continue;
        this.fail(problem);
      }
      for (let number = 0; number < POLLS_PER_TRY && !document.hidden && !this.isRefused; number += 1) {
        try {
          this.take(await json("/api/v1/status", {signal: AbortSignal.timeout(SILENCE_MS)}), "polling");
          await pause(POLL_MS);
        } catch (problem) {
          this.fail(problem);
          await pause(RETRY_MS[Math.min(this.failures, RETRY_MS.length) - 1]);
          break;
        }
      }
    }
  }

  take(row, link) {
    this.heard = Date.now();
    this.failures = 0;
    this.told.link(link);
    this.told.row(row);
  }

  fail(problem) {
    this.failures += 1;
    this.isRefused = problem instanceof Refused;
    if (this.isRefused) this.told.link("refused");
    else if (this.failures > 1) this.told.link("stale");
  }

  async stream() {
    const stop = new AbortController();
    let watch = setTimeout(() => stop.abort(), SILENCE_MS);
    const hidden = () => { if (document.hidden) stop.abort(); };
    document.addEventListener("visibilitychange", hidden);
    try {
      const response = must(await ask("/api/v1/live", {signal: stop.signal, headers: {accept: "text/event-stream"}}));
      if (!(response.headers.get("content-type") || "").startsWith("text/event-stream")) throw new Error("no stream");
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "";
      for (;;) {
        const {value, done} = await reader.read();
        if (done) return;
        clearTimeout(watch);
        watch = setTimeout(() => stop.abort(), SILENCE_MS);
        buffer += value;
        const events = buffer.split(/\r\n\r\n|\n\n|\r\r/);
        buffer = events.pop();
        for (const event of events) {
          const data = lines(event);
          const row = data ? JSON.parse(data) : null;
          if (row && row.phase) this.take(row, "live");
        }
      }
    } finally {
      clearTimeout(watch);
      document.removeEventListener("visibilitychange", hidden);
      stop.abort();
    }
  }
}
