// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(n);

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function duration(ms) {
  if (ms == null || Number.isNaN(ms)) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  return `${Math.floor(ms / 60_000)} min ${Math.floor((ms % 60_000) / 1000)} s`;
}

/** For an axis: of a round number. */
export const shortDuration = (ms) => (ms < 1000 ? `${ms} ms` : `${ms / 1000} s`);

export const rate = (perSecond) => (perSecond < 100 ? perSecond.toFixed(1) : count(Math.round(perSecond)));

export function percent(p) {
  if (p > 0.9995) return "100 %";
  return p < 0.0005 ? "< 0.1 %" : `${(100 * p).toFixed(1)} %`;
}

/** The q-quantile (0 to 1) of numbers in any order; null of none. */
export function quantile(values, q) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

/** The smallest of 1, 2 and 5 times a power of ten that is at least n. */
export function niceCeiling(n) {
  const power = 10 ** Math.floor(Math.log10(n));
  return power * [1, 2, 5, 10].find((step) => step * power >= n * 0.999999);
}
