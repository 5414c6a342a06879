// Written by `npm run build` in `ui/`.

/// Identifies this build of the page.
pub const PAGE: &str = "b2e5fd02c3a14e15";

/// All files, by path.
const FILES: &[File] = &[
    File { path: "assets/format-D0qO1jJl.js", bytes: include_bytes!("assets/format-D0qO1jJl.js.gz"), gzip: true },
    File { path: "assets/index-3xSUzUwR.js", bytes: include_bytes!("assets/index-3xSUzUwR.js.gz"), gzip: true },
    File { path: "assets/index-TccOFCFJ.css", bytes: include_bytes!("assets/index-TccOFCFJ.css.gz"), gzip: true },
    File { path: "assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2", bytes: include_bytes!("assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2"), gzip: false },
    File { path: "assets/katex-BYLiqMcl.js", bytes: include_bytes!("assets/katex-BYLiqMcl.js.gz"), gzip: true },
    File { path: "assets/lowlight-DrXArZO6.js", bytes: include_bytes!("assets/lowlight-DrXArZO6.js.gz"), gzip: true },
    File { path: "assets/mark-C7qzi_Ij.svg", bytes: include_bytes!("assets/mark-C7qzi_Ij.svg.gz"), gzip: true },
    File { path: "assets/models-page-BXA6m_q2.js", bytes: include_bytes!("assets/models-page-BXA6m_q2.js.gz"), gzip: true },
    File { path: "assets/models-page-DVfIT3-m.css", bytes: include_bytes!("assets/models-page-DVfIT3-m.css.gz"), gzip: true },
    File { path: "assets/pdf-YwugTw7Y.js", bytes: include_bytes!("assets/pdf-YwugTw7Y.js.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CIqJB0yW.mjs", bytes: include_bytes!("assets/pdf.worker.min-CIqJB0yW.mjs.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CioIZagP.js", bytes: include_bytes!("assets/pdf.worker.min-CioIZagP.js.gz"), gzip: true },
    File { path: "assets/playground-page-C5u74rA1.js", bytes: include_bytes!("assets/playground-page-C5u74rA1.js.gz"), gzip: true },
    File { path: "assets/playground-page-puvaOtMB.css", bytes: include_bytes!("assets/playground-page-puvaOtMB.css.gz"), gzip: true },
    File { path: "assets/remark-math-D_yRpuZ4.js", bytes: include_bytes!("assets/remark-math-D_yRpuZ4.js.gz"), gzip: true },
    File { path: "assets/rolldown-runtime-XKyaHtl9.js", bytes: include_bytes!("assets/rolldown-runtime-XKyaHtl9.js.gz"), gzip: true },
    File { path: "assets/room-page-C1XNecaO.js", bytes: include_bytes!("assets/room-page-C1XNecaO.js.gz"), gzip: true },
    File { path: "assets/room-page-Cygy5atz.css", bytes: include_bytes!("assets/room-page-Cygy5atz.css.gz"), gzip: true },
    File { path: "assets/settings-page-C1EvSav_.css", bytes: include_bytes!("assets/settings-page-C1EvSav_.css.gz"), gzip: true },
    File { path: "assets/settings-page-Tpeg_Gej.js", bytes: include_bytes!("assets/settings-page-Tpeg_Gej.js.gz"), gzip: true },
    File { path: "assets/vendor-DQMvNm_X.js", bytes: include_bytes!("assets/vendor-DQMvNm_X.js.gz"), gzip: true },
    File { path: "index.html", bytes: include_bytes!("index.html.gz"), gzip: true },
    File { path: "licenses.txt", bytes: include_bytes!("licenses.txt.gz"), gzip: true },
];
