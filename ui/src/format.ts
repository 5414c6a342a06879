// Numbers for people. Units always, and never more digits than a measurement has.

export function bytes(n: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let value = n;
  while (value >= 999.95 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return unit === 0 ? `${n} B` : `${value.toFixed(1)} ${units[unit]}`;
}

export function count(n: number): string {
  if (n >= 999.95e6) return `${(n / 1e9).toFixed(1)} B`;
  if (n >= 999.95e3) return `${(n / 1e6).toFixed(1)} M`;
  if (n >= 10_000) return `${(n / 1e3).toFixed(1)} k`;
  return String(n);
}

/** All digits, in groups: `2,048`. */
export function grouped(n: number): string {
  return n.toLocaleString("en");
}

/** Three digits. */
export function rate(n: number): string {
  if (!Number.isFinite(n)) return "–";
  if (n === 0) return "0";
  if (n >= 99.95) return n.toFixed(0);
  if (n >= 9.995) return n.toFixed(1);
  return n.toFixed(2);
}

export function seconds(s: number): string {
  if (s === 0) return "0 s";
  if (s < 0.9995) return `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`;
  if (s < 59.95) return `${s.toFixed(1)} s`;
  const whole = Math.round(s);
  const then = (n: number, unit: string) => (n > 0 ? ` ${n} ${unit}` : "");
  if (whole < 3600) return `${Math.floor(whole / 60)} min${then(whole % 60, "s")}`;
  return `${Math.floor(whole / 3600)} h${then(Math.floor((whole % 3600) / 60), "min")}`;
}

export function plural(n: number, noun: string): string {
  return `${n} ${noun}${n === 1 ? "" : "s"}`;
}

export function ago(milliseconds: number): string {
  const s = Math.max(0, (Date.now() - milliseconds) / 1000);
  const units: [number, string][] = [
    [7 * 86400, "week"],
    [86400, "day"],
    [3600, "hour"],
    [60, "minute"],
  ];
  const found = units.find(([length]) => s >= length);
  return found ? `${plural(Math.floor(s / found[0]), found[1])} ago` : "just now";
}

export function percent(part: number, whole: number): string {
  return whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–";
}
