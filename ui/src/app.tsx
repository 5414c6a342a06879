import { Suspense, lazy, useEffect } from "react";
import { Redirect, Route, Router, Switch } from "wouter";
import { useHashLocation } from "wouter/use-hash-location";

import { ChatPage } from "./chat/chat-page.tsx";
import { AwayNote, KeyPage, Rail, Strip } from "./components/frame.tsx";
import { Palette } from "./components/palette.tsx";
import { Boundary, UpdateNote } from "./components/recover.tsx";
import { Toasts } from "./components/toasts.tsx";
import { listenToTabs, useChat } from "./store/chat.ts";
import { useServer } from "./store/server.ts";

const LOADERS = {
  models: () => import("./models/models-page.tsx"),
  room: () => import("./room/room-page.tsx"),
  playground: () => import("./playground/playground-page.tsx"),
  settings: () => import("./settings/settings-page.tsx"),
};
const ModelsPage = lazy(LOADERS.models);
const RoomPage = lazy(LOADERS.room);
const PlaygroundPage = lazy(LOADERS.playground);
const SettingsPage = lazy(LOADERS.settings);

/** Loads the other pages while nothing else is to do, so that they open at once and without the server. */
function usePreload(): void {
  useEffect(() => {
    const load = () => void Promise.all(Object.values(LOADERS).map((one) => one().catch(() => undefined)));
    if (typeof requestIdleCallback === "function") {
      const handle = requestIdleCallback(load, { timeout: 5000 });
      return () => cancelIdleCallback(handle);
    }
    const timer = setTimeout(load, 1500);
    return () => clearTimeout(timer);
  }, []);
}

/** A page with its parameter in the address; what cannot be decoded stays as it is. */
function decoded(text: string | undefined): string | null {
  if (text === undefined) return null;
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

export function App() {
  return (
    <Router hook={useHashLocation}>
      <Frame />
    </Router>
  );
}

function Frame() {
  const session = useServer((server) => server.session);
  const [location] = useHashLocation();
  useEffect(() => {
    void useChat.getState().refresh();
    return listenToTabs();
  }, []);
  usePreload();
  if (session?.needs_key && !session.key_known) return <KeyPage />;
  return (
    <div className="frame">
      <main className="main" id="main">
        <AwayNote />
        <UpdateNote />
        <div className="main-page">
          <Boundary place={location}>
            <Suspense fallback={<Loading />}>
              <Switch>
                <Route path="/chat/:id?">{({ id }) => <ChatPage id={id ?? null} />}</Route>
                <Route path="/models" component={ModelsPage} />
                <Route path="/room" component={RoomPage} />
                <Route path="/playground/:tab?/:model?">{({ tab, model }) => <PlaygroundPage tab={tab ?? "completion"} wanted={decoded(model)} />}</Route>
                <Route path="/settings" component={SettingsPage} />
                <Route>
                  <Redirect to="/chat" replace />
                </Route>
              </Switch>
            </Suspense>
          </Boundary>
        </div>
      </main>
      <Rail />
      <Strip />
      <Palette />
      <Toasts />
    </div>
  );
}

function Loading() {
  return (
    <div className="page">
      <p className="empty late">Loading the page</p>
    </div>
  );
}
