import * as Ariakit from "@ariakit/react";
import type { ReactElement } from "react";

type Placement = NonNullable<Ariakit.TooltipProviderProps["placement"]>;

/** Says more about something while the pointer or the keyboard is there. */
export function Tip({ text, placement = "top", children }: { text: string; placement?: Placement; children: ReactElement }) {
  return (
    <Ariakit.TooltipProvider placement={placement} timeout={400} hideTimeout={0}>
      <Ariakit.TooltipAnchor render={children} />
      <Ariakit.Tooltip className="tooltip" gutter={6} unmountOnHide>
        {text}
      </Ariakit.Tooltip>
    </Ariakit.TooltipProvider>
  );
}
