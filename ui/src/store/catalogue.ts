// Well-known models and what they need.

import { useEffect, useState } from "react";

import { json } from "../api/client.ts";
import type { Catalogue } from "../api/types.ts";
import { useServer } from "./server.ts";

/** The catalogue, read again when a model has come or gone; `null` until it is there. */
export function useCatalogue(): Catalogue | null {
  const [catalogue, setCatalogue] = useState<Catalogue | null>(null);
  const names = useServer((server) => server.models.map((model) => model.name).join("\n"));
  useEffect(() => {
    const abort = new AbortController();
    json<Catalogue>("/ui/v1/catalogue", { signal: abort.signal }).then(setCatalogue, () => undefined);
    return () => abort.abort();
  }, [names]);
  return catalogue;
}
