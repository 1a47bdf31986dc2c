// Numbers, sizes and times as people read them; indexd.pages.wording says the same without a script.
// Offsets have 64 bits and come as texts: they are grouped as texts, and compared as BigInt.

export const big = (value) => (value === null || value === undefined ? 0n : BigInt(value));
export const least = (...values) => values.reduce((a, b) => (b < a ? b : a));
export const most = (...values) => values.reduce((a, b) => (b > a ? b : a));
export const group = (value) => String(value).replace(/\B(?=(\d{3})+(?!\d))/g, ",");

export const amount = (value) => {
  if (Math.abs(value) < 1e6) return group(Math.round(value));
  for (const [unit, factor] of [["M", 1e6], ["G", 1e9], ["T", 1e12]]) {
    if (Math.abs(value) < 999.5 * factor || unit === "T") return `${Number((value / factor).toPrecision(3))} ${unit}`;
  }
};

export const size = (bytes) => {
  let value = Number(bytes);
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (value < 1024 || unit === "TiB") {
      return `${unit === "B" || value >= 100 ? value.toFixed(0) : Number(value.toPrecision(3))} ${unit}`;
    }
    value /= 1024;
  }
};

export const duration = (millis) => {
  const value = Number(millis);
  if (value < 1000) return `${Math.round(value)} ms`;
  if (value < 60000) return `${Number((value / 1000).toPrecision(3))} s`;
  const parts = [];
  let rest = Math.floor(value / 1000);
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]]) {
    const count = Math.floor(rest / length);
    rest -= count * length;
    if (count) parts.push(`${group(count)} ${unit}`);
  }
  return parts.slice(0, 2).join(" ");
};

export const share = (value) => (value === 0 || value === 1 ? `${100 * value} %` : `${(100 * value).toFixed(1)} %`);

let isLocal = false;
export const useLocal = (local) => { isLocal = local; };
const two = (value) => String(value).padStart(2, "0");

// The zone's distance from UTC now, as in an ISO time: +08:00.
export const zoneOffset = () => {
  const minutes = -new Date().getTimezoneOffset();
  const far = Math.abs(minutes);
  return `${minutes < 0 ? "-" : "+"}${two(Math.floor(far / 60))}:${two(far % 60)}`;
};

export const stamp = (millis) => {
  const date = new Date(Number(millis));
  if (Number.isNaN(date.getTime())) return `${millis} ms`;
  if (!isLocal) return date.toISOString().replace("T", " ").replace("Z", "");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${clock(millis)}.${String(date.getMilliseconds()).padStart(3, "0")}`;
};

export const clock = (millis) => {
  const date = new Date(Number(millis));
  if (!isLocal) return date.toISOString().slice(11, 19);
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
};

// Every time that the server wrote in UTC, in the zone that is wanted.
export const retime = (root) => {
  for (const time of root.querySelectorAll("time[data-ms]")) {
    time.textContent = time.dataset.short === undefined ? stamp(time.dataset.ms) : clock(time.dataset.ms);
    time.title = isLocal ? new Date(Number(time.dataset.ms)).toISOString() : "UTC";
  }
};
