import "uplot/dist/uPlot.min.css";

import { useEffect, useRef } from "react";
import uPlot from "uplot";

import { useDark } from "../store/prefs.ts";
import { token } from "./palette.ts";

export interface Line {
  label: string;
  /** Name of a colour. */
  color: string;
  dash?: number[];
  fill?: boolean;
  values: (number | null)[];
}

/** Lines over the last minutes, with units. `times` are seconds before now, so negative. */
export function Chart({ title, unit, times, lines, format, now }: { title: string; unit: string; times: number[]; lines: Line[]; format: (value: number) => string; now: string }) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const dark = useDark((state) => state.dark);
  const write = useRef(format);
  write.current = format;

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const [muted, line] = [token("--muted"), token("--line")];
    const font = "11px system-ui, sans-serif";
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: 132,
        padding: [8, 16, 0, 0],
        legend: { show: false },
        cursor: { y: false, points: { size: 5 } },
        scales: { x: { time: false, range: (_, least) => [Math.min(-60, least), 0] }, y: { range: (_, __, most) => [0, most > 0 ? most * 1.12 : 1] } },
        axes: [
          {
            stroke: muted,
            font,
            size: 22,
            grid: { show: false },
            ticks: { show: false },
            space: 70,
            values: (_, splits) => splits.map((at) => (at === 0 ? "now" : `${at} s`)),
          },
          {
            stroke: muted,
            font,
            size: 58,
            space: 34,
            grid: { stroke: line, width: 1 },
            ticks: { show: false },
            values: (_, splits) => splits.map((value) => write.current(value)),
          },
        ],
        series: [
          {},
          ...lines.map(({ label, color, dash, fill }) => ({
            label,
            stroke: token(color),
            width: 1.5,
            spanGaps: true,
            points: { show: false },
            ...(dash ? { dash } : {}),
            ...(fill ? { fill: `color-mix(in srgb, ${token(color)} 14%, transparent)` } : {}),
          })),
        ],
      },
      [times, ...lines.map((one) => one.values)],
      element,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: 132 }));
    observer.observe(element);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
    // The lines of a chart are always the same; their values come below.
  }, [dark]);

  useEffect(() => plot.current?.setData([times, ...lines.map((one) => one.values)]));

  return (
    <figure className="chart">
      <figcaption>
        <span>
          {title} <span className="muted">{unit}</span>
        </span>
        <span className="num">{now}</span>
      </figcaption>
      <div ref={box} role="img" aria-label={`${title}: ${now}`} />
      {lines.length > 1 && (
        <ul className="legend">
          {lines.map(({ label, color, dash }) => (
            <li key={label}>
              <i className={dash ? "swatch-line dashed" : "swatch-line"} style={{ color: `var(${color})` }} /> {label}
            </li>
          ))}
        </ul>
      )}
    </figure>
  );
}
