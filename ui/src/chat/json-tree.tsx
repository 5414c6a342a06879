/** The object or list that a text is as a whole. */
export function parseWhole(text: string): unknown {
  const trimmed = text.trim();
  if (!/^[[{]/.test(trimmed)) return undefined;
  try {
    return JSON.parse(trimmed) as unknown;
  } catch {
    return undefined;
  }
}

/** A value of JSON, to be folded and unfolded. */
export function JsonTree({ value, name, depth = 0 }: { value: unknown; name?: string; depth?: number }) {
  const label = name === undefined ? null : <span className="json-key">{name}</span>;
  if (value === null || typeof value !== "object") {
    return (
      <div className="json-leaf">
        {label} <span className={`json-${value === null ? "null" : typeof value}`}>{JSON.stringify(value)}</span>
      </div>
    );
  }
  const isList = Array.isArray(value);
  const entries = Object.entries(value);
  const size = isList ? `${entries.length} items` : `${entries.length} fields`;
  return (
    <details className="json" open={depth < 3 && entries.length <= 100}>
      <summary>
        {label ?? <span className="json-key">{isList ? "list" : "object"}</span>} <span className="muted">{size}</span>
      </summary>
      {entries.slice(0, 500).map(([key, inner]) => (
        <JsonTree key={key} value={inner} name={key} depth={depth + 1} />
      ))}
      {entries.length > 500 && <div className="muted">and {entries.length - 500} more</div>}
    </details>
  );
}
