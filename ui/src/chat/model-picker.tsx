import * as Ariakit from "@ariakit/react";
import { Check, ChevronDown, LoaderCircle } from "lucide-react";
import { useEffect, useState } from "react";

import { attempt } from "../components/toasts.tsx";
import { bytes, seconds } from "../format.ts";
import { useServer } from "../store/server.ts";

export function ModelPicker({ model, choose }: { model: string | null; choose: (name: string) => void }) {
  const { models, memory, loading } = useServer();
  const started = model ? loading[model] : undefined;
  const card = models.find((one) => one.name === model);
  return (
    <Ariakit.MenuProvider placement="bottom-start">
      <Ariakit.MenuButton className="button quiet picker">
        <span className="sr">Model: </span>
        {started !== undefined ? (
          <LoaderCircle size={14} className="spin" aria-hidden />
        ) : (
          <span className={`dot ${card?.loaded ? "on" : ""}`} aria-hidden />
        )}
        <span className="picked">{model ?? "No model"}</span>
        {started !== undefined && <Elapsed since={started} />}
        <ChevronDown size={14} aria-hidden />
      </Ariakit.MenuButton>
      <Ariakit.Menu className="menu" gutter={4} unmountOnHide>
        <div className="menu-note">
          <span>Memory for models</span>
          <span className="num">
            {bytes(memory.used)} of {bytes(memory.limit)}
          </span>
          <div className="bar">
            <span style={{ width: `${memory.limit ? (100 * memory.used) / memory.limit : 0}%` }} />
          </div>
        </div>
        {models.map((one) => (
          <Ariakit.MenuItem
            key={one.name}
            className="menu-item"
            disabled={one.problem !== null}
            onClick={() => {
              choose(one.name);
              if (!one.loaded) void attempt(() => useServer.getState().load(one.name));
            }}
          >
            <span className={`dot ${one.loaded ? "on" : ""}`} aria-hidden />
            <span className="grow">
              {one.name}
              <span className="menu-sub">
                {one.problem ??
                  [one.file?.family, one.file?.quantization, bytes(one.loaded?.bytes ?? one.bytes), one.loaded ? "loaded" : "not loaded"]
                    .filter(Boolean)
                    .join(" · ")}
              </span>
            </span>
            {one.name === model && <Check size={16} aria-label="chosen" />}
          </Ariakit.MenuItem>
        ))}
      </Ariakit.Menu>
    </Ariakit.MenuProvider>
  );
}

function Elapsed({ since }: { since: number }) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setNow(Date.now()), 200);
    return () => clearInterval(timer);
  }, []);
  return <span className="muted">loading, {seconds(Math.max(0, now - since) / 1000)}</span>;
}
