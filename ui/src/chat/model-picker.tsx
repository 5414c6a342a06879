import * as Ariakit from "@ariakit/react";
import { Check, ChevronDown, FlaskConical, LoaderCircle } from "lucide-react";
import { useEffect, useState } from "react";
import { useLocation } from "wouter";

import { attempt } from "../components/toasts.tsx";
import { bytes, seconds } from "../format.ts";
import { useServer } from "../store/server.ts";
import { cardOf, chats, playgroundOf } from "../store/uses.ts";

export function ModelPicker({ model, choose }: { model: string | null; choose: (name: string) => void }) {
  const { models, memory, loading } = useServer();
  const [, navigate] = useLocation();
  const card = cardOf(models, model);
  const started = card ? loading[card.name] : undefined;
  const able = models.filter((one) => chats(one) || one.problem !== null);
  const benches = models.flatMap((one) => {
    const bench = playgroundOf(one);
    return bench ? [{ one, bench }] : [];
  });
  return (
    <Ariakit.MenuProvider placement="bottom-start">
      <Ariakit.MenuButton className="button quiet picker">
        <span className="sr">Model: </span>
        {started !== undefined ? (
          <LoaderCircle size={14} className="spin" aria-hidden />
        ) : (
          <span className={`dot ${card?.loaded || card?.adapter?.loaded ? "on" : ""}`} aria-hidden />
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
        {able.map((one) => (
          <Ariakit.MenuItem
            key={one.name}
            className="menu-item"
            disabled={one.problem !== null}
            onClick={() => {
              choose(one.name);
              if (!one.loaded) void attempt(() => useServer.getState().load(one.name));
            }}
          >
            <span className={`dot ${one.loaded || one.adapter?.loaded ? "on" : ""}`} aria-hidden />
            <span className="grow">
              {one.name}
              <span className="menu-sub">
                {one.problem ??
                  [
                    one.adapter ? `adapter of ${one.adapter.base}` : one.file?.family,
                    !one.adapter && one.file?.quantization,
                    bytes(one.loaded?.bytes ?? one.bytes),
                    one.loaded || one.adapter?.loaded ? "loaded" : "not loaded",
                  ]
                    .filter(Boolean)
                    .join(" · ")}
              </span>
            </span>
            {one.name === card?.name && <Check size={16} aria-label="chosen" />}
          </Ariakit.MenuItem>
        ))}
        {benches.length > 0 && (
          <Ariakit.MenuGroup>
            <Ariakit.MenuGroupLabel className="menu-label">In the playground</Ariakit.MenuGroupLabel>
            {benches.map(({ one, bench }) => (
              <Ariakit.MenuItem key={one.name} className="menu-item" onClick={() => navigate(bench.path)}>
                <FlaskConical size={14} aria-hidden />
                <span className="grow">
                  {one.name}
                  <span className="menu-sub">{bench.name}</span>
                </span>
              </Ariakit.MenuItem>
            ))}
          </Ariakit.MenuGroup>
        )}
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
