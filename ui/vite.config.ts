import react from "@vitejs/plugin-react";
import { defineConfig } from "vite";

import { embed } from "./build/embed.ts";

// The server that `npm run dev` shows the page of.
const server = process.env["PAGURO_URL"] ?? "http://127.0.0.1:11434";
const passed = ["/ui/v1", "/v1", "/api", "/status", "/health", "/tokenize", "/detokenize", "/openapi.json", "/docs"];

export default defineConfig(({ command, isPreview }) => ({
  base: command === "build" || isPreview ? "/ui/" : "/",
  plugins: [react(), embed("../crates/server/src/ui/dist")],
  build: {
    target: "es2022",
    outDir: "../target/ui",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 2000,
    reportCompressedSize: false,
    rolldownOptions: {
      output: {
        // Libraries that every page needs, apart: their file stays the same while the page changes.
        codeSplitting: {
          groups: [
            {
              name: "vendor",
              test: /node_modules\/(react|react-dom|scheduler|@ariakit|@floating-ui|zustand|dexie|wouter|virtua|use-sync-external-store)\//,
            },
          ],
        },
      },
    },
  },
  server: { proxy: Object.fromEntries(passed.map((path) => [path, { target: server }])) },
}));
