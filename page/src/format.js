export const count = (n) => (n == null ? "–" : Math.round(n).toLocaleString("en"));

export function milliseconds(ms) {
  if (ms == null) return "–";
  if (ms >= 9995) return `${(ms / 1000).toFixed(1)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(2)} s`;
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
}

export const rate = (perSecond) =>
  perSecond == null ? "–" : perSecond >= 100 ? count(perSecond) : perSecond.toFixed(1);

export const ratio = (n) => (n == null ? "–" : `${n.toFixed(2)}×`);

export const percent = (share) => (share == null ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`);

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;
