import { Suspense, lazy, useEffect } from "react";
import { Redirect, Route, Router, Switch } from "wouter";
import { useHashLocation } from "wouter/use-hash-location";

import { ChatPage } from "./chat/chat-page.tsx";
import { AwayNote, KeyPage, Rail, Strip } from "./components/frame.tsx";
import { Palette } from "./components/palette.tsx";
import { Toasts } from "./components/toasts.tsx";
import { useChat } from "./store/chat.ts";
import { useServer } from "./store/server.ts";

const ModelsPage = lazy(() => import("./models/models-page.tsx"));
const RoomPage = lazy(() => import("./room/room-page.tsx"));
const PlaygroundPage = lazy(() => import("./playground/playground-page.tsx"));
const SettingsPage = lazy(() => import("./settings/settings-page.tsx"));

export function App() {
  const session = useServer((server) => server.session);
  useEffect(() => void useChat.getState().refresh(), []);
  if (session?.needs_key && !session.key_known) return <KeyPage />;
  return (
    <Router hook={useHashLocation}>
      <div className="frame">
        <main className="main" id="main">
          <AwayNote />
          <Suspense fallback={null}>
            <Switch>
              <Route path="/chat/:id?">{({ id }) => <ChatPage id={id ?? null} />}</Route>
              <Route path="/models" component={ModelsPage} />
              <Route path="/room" component={RoomPage} />
              <Route path="/playground/:tab?">{({ tab }) => <PlaygroundPage tab={tab ?? "completion"} />}</Route>
              <Route path="/settings" component={SettingsPage} />
              <Route>
                <Redirect to="/chat" replace />
              </Route>
            </Switch>
          </Suspense>
        </main>
        <Rail />
        <Strip />
        <Palette />
        <Toasts />
      </div>
    </Router>
  );
}
