import * as Ariakit from "@ariakit/react";
import { LoaderCircle, TriangleAlert, Wrench } from "lucide-react";
import { useEffect } from "react";
import { Link } from "wouter";

import { plural } from "../format.ts";
import { useServer } from "../store/server.ts";
import { useTools } from "../store/tools.ts";

/** Which servers of tools the model of this chat may use. */
export function ToolMenu({ enabled, change }: { enabled: string[]; change: (enabled: string[]) => void }) {
  const { servers, known, refresh } = useTools();
  const allowed = useServer((server) => server.may("inference"));
  useEffect(() => {
    if (allowed) void refresh().catch(() => undefined);
  }, [allowed, refresh]);
  if (!known || (servers.length === 0 && enabled.length === 0)) return null;
  const gone = enabled.filter((name) => !servers.some((server) => server.name === name));
  const toggle = (name: string) => change(enabled.includes(name) ? enabled.filter((one) => one !== name) : [...enabled, name]);
  return (
    <Ariakit.MenuProvider placement="top-start" values={{ servers: enabled }}>
      <Ariakit.MenuButton className={`button quiet tool-button${enabled.length ? " on" : ""}`} aria-label={`Tools: ${plural(enabled.length, "server")} on`} title="Tools that the model may use" onClick={() => void refresh().catch(() => undefined)}>
        <Wrench size={17} aria-hidden />
        {enabled.length > 0 && <span className="num">{enabled.length}</span>}
      </Ariakit.MenuButton>
      <Ariakit.Menu className="menu" gutter={6} unmountOnHide aria-label="Tools">
        {servers.map((server) => (
          <Ariakit.MenuItemCheckbox
            key={server.name}
            name="servers"
            value={server.name}
            className="menu-item"
            hideOnClick={false}
            onClick={() => toggle(server.name)}
          >
            <Ariakit.MenuItemCheck />
            <span className="grow">
              {server.name}
              <span className="menu-sub">
                {server.state === "starting" ? "starting" : (server.problem ?? (server.tools.map((tool) => tool.title ?? tool.name).join(", ") || "has no tools"))}
              </span>
            </span>
            {server.state === "starting" && <LoaderCircle size={14} className="spin" aria-hidden />}
            {server.state === "failed" && <TriangleAlert size={14} aria-hidden />}
          </Ariakit.MenuItemCheckbox>
        ))}
        {gone.map((name) => (
          <Ariakit.MenuItemCheckbox key={name} name="servers" value={name} className="menu-item" hideOnClick={false} onClick={() => toggle(name)}>
            <Ariakit.MenuItemCheck />
            <span className="grow">
              {name}
              <span className="menu-sub">is not there any more</span>
            </span>
          </Ariakit.MenuItemCheckbox>
        ))}
        <hr className="menu-separator" />
        <Ariakit.MenuItem className="menu-item" render={<Link href="/settings" />}>
          <span className="grow muted small">Servers and trusted tools are in Settings</span>
        </Ariakit.MenuItem>
      </Ariakit.Menu>
    </Ariakit.MenuProvider>
  );
}
