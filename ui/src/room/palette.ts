// Colours of sequences: twelve hues of equal lightness, in an order in which neighbours differ for every kind of
// colour vision.

const HUES = [35, 215, 95, 300, 160, 350, 255, 65, 190, 325, 125, 275];

export function sequenceColor(index: number, dark: boolean): string {
  const hue = HUES[index % HUES.length] ?? 0;
  return dark ? `oklch(0.74 0.115 ${hue})` : `oklch(0.64 0.13 ${hue})`;
}

export function token(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
