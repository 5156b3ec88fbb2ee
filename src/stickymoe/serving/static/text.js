// Numbers as text.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

// Three digits, as 0.123, 1.23, 12.3, 123 or 1,230.
export function number(value) {
  const size = Math.abs(value);
  const digits = size >= 100 || value === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function bytes(value) {
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value ? number(value) : Math.round(value)} ${UNITS[unit]}`;
}

export function seconds(value) {
  return value < 1 ? `${number(value * 1000)} ms` : `${number(value)} s`;
}

export const percent = (share) => `${(100 * share).toFixed(share > 0.0005 && share < 0.9995 ? 1 : 0)} %`;

export const plural = (n, noun, several = `${noun}s`) => `${n} ${n === 1 ? noun : several}`;
