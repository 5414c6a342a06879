import * as Ariakit from "@ariakit/react";
import { type ReactNode, useState } from "react";

export function Dialog({
  open,
  close,
  title,
  children,
}: {
  open: boolean;
  close: () => void;
  title: string;
  children: ReactNode;
}) {
  return (
    <Ariakit.Dialog open={open} onClose={close} backdrop={<div className="backdrop" />} className="dialog" unmountOnHide>
      <Ariakit.DialogHeading render={<h1 />}>{title}</Ariakit.DialogHeading>
      {children}
    </Ariakit.Dialog>
  );
}

/** A button that asks before it does something that cannot be undone. */
export function ConfirmButton({
  label,
  title,
  text,
  action,
  className,
  children,
  confirm,
}: {
  label: string;
  title: string;
  text: string;
  action: () => void;
  className?: string;
  children: ReactNode;
  confirm?: string;
}) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" className={className ?? "button quiet icon"} aria-label={label} title={label} onClick={() => setOpen(true)}>
        {children}
      </button>
      <Dialog open={open} close={() => setOpen(false)} title={title}>
        <p>{text}</p>
        <div className="actions">
          <button type="button" className="button" onClick={() => setOpen(false)}>
            Keep
          </button>
          <button
            type="button"
            className="button danger"
            onClick={() => {
              setOpen(false);
              action();
            }}
          >
            {confirm ?? "Delete"}
          </button>
        </div>
      </Dialog>
    </>
  );
}
