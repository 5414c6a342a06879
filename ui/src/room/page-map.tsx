// Every page of the arena as a cell, in groups of sixteen.

import { Minus, Plus } from "lucide-react";
import { useEffect, useLayoutEffect, useRef, useState } from "react";

import { seconds } from "../format.ts";
import { useDark } from "../store/prefs.ts";
import { type ModelFrame, type PageTimes, pagesOf } from "./history.ts";
import { sequenceColor, token } from "./palette.ts";

const GROUP = 16;
/** How high the map is wished to be; a map with larger cells scrolls. */
const HEIGHT = 380;
const SMALLEST = 2;
const LARGEST = 22;
const FADE = 90_000;
const FLASH = 900;

interface Layout {
  /** Width and height of a cell with its gap; a fraction, so that the groups fill the width. */
  cell: number;
  gap: number;
  groupGap: number;
  groups: number;
  columns: number;
  rows: number;
}

function layoutOf(width: number, pages: number, zoom: number): Layout {
  const at = (groups: number): Layout => {
    const rough = width / (GROUP * groups);
    const groupGap = groups === 1 ? 0 : rough >= 8 ? 8 : rough >= 4 ? 4 : 1;
    const cell = Math.min(LARGEST, (width - (groups - 1) * groupGap) / (GROUP * groups));
    const gap = cell >= 8 ? 2 : cell >= 4 ? 1 : 0;
    const columns = groups * GROUP;
    return { cell, gap, groupGap, groups, columns, rows: Math.ceil(pages / columns) };
  };
  const most = Math.max(1, Math.floor(width / (GROUP * SMALLEST)));
  let best = 1;
  while (best < most && at(best).rows * at(best).cell > HEIGHT) best += 1;
  return at(Math.min(most, Math.max(1, best - zoom)));
}

function place(layout: Layout, page: number): [number, number] {
  const index = page - 1;
  const column = index % layout.columns;
  const x = column * layout.cell + Math.floor(column / GROUP) * layout.groupGap;
  return [Math.round(x), Math.round(Math.floor(index / layout.columns) * layout.cell)];
}

export function PageMap({
  model,
  times,
  now,
  hovered,
  hover,
}: {
  model: ModelFrame;
  times: PageTimes | undefined;
  now: number;
  hovered: string | null;
  hover: (id: string | null) => void;
}) {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [zoom, setZoom] = useState(0);
  const [page, setPage] = useState<number | null>(null);
  const dark = useDark((state) => state.dark);

  useLayoutEffect(() => {
    const element = box.current;
    if (!element) return;
    const observer = new ResizeObserver(() => setWidth(element.clientWidth));
    observer.observe(element);
    setWidth(element.clientWidth);
    return () => observer.disconnect();
  }, []);

  const layout = layoutOf(width, model.stats.pages, zoom);
  const height = Math.ceil(layout.rows * layout.cell);

  useEffect(() => {
    const element = canvas.current;
    if (!element || width === 0) return;
    draw(element, width, height, layout, model, times, now, hovered, dark);
  });

  const owners = page === null ? [] : model.sequences.filter((one) => one.runs.some(([first, length]) => page >= first && page < first + length));
  const isCached = page !== null && owners.length === 0 && model.cached.some(([first, length]) => page >= first && page < first + length);
  const pageAt = (x: number, y: number): number | null => {
    const stride = GROUP * layout.cell + layout.groupGap;
    const group = Math.floor(x / stride);
    const inside = Math.floor((x - group * stride) / layout.cell);
    if (inside < 0 || inside >= GROUP || group * GROUP >= layout.columns) return null;
    const found = Math.floor(y / layout.cell) * layout.columns + group * GROUP + inside + 1;
    return found >= 1 && found <= model.stats.pages ? found : null;
  };
  const { pages, pages_used, pages_cached } = model.stats;
  return (
    <div className="map">
      <div className="map-scroll" ref={box} tabIndex={0} role="img" aria-label={`Page map: ${pages} pages, ${pages_used} in use, ${pages_cached} cached, ${pages - pages_used - pages_cached} free`}>
        <canvas
          ref={canvas}
          style={{ width, height }}
          onPointerMove={(event) => {
            const bounds = event.currentTarget.getBoundingClientRect();
            const found = pageAt(event.clientX - bounds.left, event.clientY - bounds.top);
            if (found === page) return;
            setPage(found);
            const owner =
              found === null ? undefined : model.sequences.find((one) => one.runs.some(([first, length]) => found >= first && found < first + length));
            hover(owner?.id ?? null);
          }}
          onPointerLeave={() => {
            setPage(null);
            hover(null);
          }}
        />
      </div>
      <div className="map-foot">
        <ul className="legend" aria-label="Colours">
          <li>
            <i className="swatch running" /> <span className="num">{pages_used}</span> in use, one colour a sequence
          </li>
          <li>
            <i className="swatch shared" /> shared
          </li>
          <li>
            <i className="swatch cached" /> <span className="num">{pages_cached}</span> cached
          </li>
          <li>
            <i className="swatch free" /> <span className="num">{pages - pages_used - pages_cached}</span> free
          </li>
        </ul>
        <span className="grow map-page num" aria-live="off">
          {page !== null &&
            `page ${page}: ${
              owners.length > 0
                ? `${owners.length > 1 ? "shared by" : "of"} ${owners.map((one) => one.id).slice(0, 6).join(", ")}${owners.length > 6 ? ` and ${owners.length - 6} more` : ""}`
                : isCached
                  ? `cached${times && Number.isFinite(times.cached[page] ?? NaN) ? ` for ${seconds(Math.max(0, now - (times.cached[page] ?? now)) / 1000)}` : ""}`
                  : "free"
            }`}
        </span>
        <span className="row">
          <button type="button" className="button quiet icon small" aria-label="Smaller cells" disabled={layout.cell <= SMALLEST * 1.1} onClick={() => setZoom(zoom - 1)}>
            <Minus size={14} aria-hidden />
          </button>
          <button type="button" className="button quiet icon small" aria-label="Larger cells" disabled={layout.cell >= LARGEST || layout.groups === 1} onClick={() => setZoom(zoom + 1)}>
            <Plus size={14} aria-hidden />
          </button>
        </span>
      </div>
    </div>
  );
}

function draw(
  canvas: HTMLCanvasElement,
  width: number,
  height: number,
  layout: Layout,
  model: ModelFrame,
  times: PageTimes | undefined,
  now: number,
  hovered: string | null,
  dark: boolean,
): void {
  const scale = devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const context = canvas.getContext("2d");
  if (!context) return;
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  const size = Math.max(1, Math.floor(layout.cell) - layout.gap);
  const cell = (page: number) => {
    const [x, y] = place(layout, page);
    context.fillRect(x, y, size, size);
  };
  const [free, sea] = [token("--page-free"), token("--sea")];

  // The holders of each page, and their number.
  const { pages } = model.stats;
  const holders = new Uint16Array(pages + 1);
  for (const { runs } of model.sequences) for (const page of pagesOf(runs)) holders[page] = (holders[page] ?? 0) + 1;
  const isCached = new Uint8Array(pages + 1);
  for (const page of pagesOf(model.cached)) isCached[page] = 1;

  context.fillStyle = free;
  for (let page = 1; page <= pages; page++) if (!holders[page] && !isCached[page]) cell(page);

  // Cached pages fade with age, in steps.
  const byAge: number[][] = [[], [], [], [], []];
  for (const page of pagesOf(model.cached)) {
    const age = times ? now - (times.cached[page] ?? -Infinity) : FADE;
    const step = Math.min(4, Math.max(0, Math.floor((5 * age) / FADE)));
    (byAge[Number.isFinite(age) ? step : 4] ?? []).push(page);
  }
  byAge.forEach((list, step) => {
    context.fillStyle = sea;
    context.globalAlpha = (hovered ? 0.5 : 1) * (0.6 - 0.09 * step);
    list.forEach(cell);
  });
  context.globalAlpha = 1;

  const notches = new Map<number, number>();
  for (const sequence of model.sequences) {
    const color = sequenceColor(sequence.color, dark);
    const faded = hovered !== null && hovered !== sequence.id;
    for (const page of pagesOf(sequence.runs)) {
      const count = holders[page] ?? 1;
      if (count === 1) {
        context.globalAlpha = faded ? 0.22 : 1;
        context.fillStyle = color;
        cell(page);
        continue;
      }
      // A shared page, with a notch for each of its holders.
      const at = notches.get(page) ?? 0;
      notches.set(page, at + 1);
      const [x, y] = place(layout, page);
      if (at === 0) {
        context.globalAlpha = faded ? 0.35 : 1;
        context.fillStyle = sea;
        context.fillRect(x, y, size, size);
      }
      if (hovered === sequence.id) {
        context.globalAlpha = 1;
        context.fillStyle = sea;
        context.fillRect(x, y, size, size);
      }
      if (size >= 6) {
        const notch = size / Math.min(count, size / 2);
        if (at * notch < size) {
          context.globalAlpha = faded ? 0.3 : 1;
          context.fillStyle = color;
          context.fillRect(x + at * notch, y + size - Math.max(2, size / 3), Math.max(1, notch - 1), Math.max(2, size / 3));
        }
      }
    }
  }
  context.globalAlpha = 1;

  // An eviction flashes once.
  if (times) {
    context.strokeStyle = token("--bad");
    context.lineWidth = layout.cell >= 8 ? 2 : 1;
    for (let page = 1; page <= pages; page++) {
      const since = now - (times.evicted[page] ?? -Infinity);
      if (since >= 0 && since < FLASH) {
        const [x, y] = place(layout, page);
        context.strokeRect(x + 0.5, y + 0.5, Math.max(1, size - 1), Math.max(1, size - 1));
      }
    }
  }
}
