import "./styles/tokens.css";
import "./styles/base.css";
import "./styles/frame.css";
import "./styles/chat.css";
import "./styles/touch.css";

import { StrictMode } from "react";
import { createRoot } from "react-dom/client";

import { App } from "./app.tsx";
import { Boundary } from "./components/recover.tsx";
import { watchTheme } from "./store/prefs.ts";
import { watchServer } from "./store/server.ts";

watchTheme();
watchServer();

const root = document.getElementById("root");
if (root) {
  createRoot(root).render(
    <StrictMode>
      <Boundary place="">
        <App />
      </Boundary>
    </StrictMode>,
  );
}
