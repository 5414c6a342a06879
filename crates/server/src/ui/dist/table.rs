// Written by `npm run build` in `ui/`.

/// Identifies this build of the page.
pub const PAGE: &str = "ac9b61cf1a3112cb";

/// All files, by path.
const FILES: &[File] = &[
    File { path: "assets/format-DRFgA2dB.js", bytes: include_bytes!("assets/format-DRFgA2dB.js.gz"), gzip: true },
    File { path: "assets/index-CK4_dzCW.js", bytes: include_bytes!("assets/index-CK4_dzCW.js.gz"), gzip: true },
    File { path: "assets/index-CUGJSUmm.css", bytes: include_bytes!("assets/index-CUGJSUmm.css.gz"), gzip: true },
    File { path: "assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2", bytes: include_bytes!("assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2"), gzip: false },
    File { path: "assets/katex-BYLiqMcl.js", bytes: include_bytes!("assets/katex-BYLiqMcl.js.gz"), gzip: true },
    File { path: "assets/lowlight-9bSaK7ps.js", bytes: include_bytes!("assets/lowlight-9bSaK7ps.js.gz"), gzip: true },
    File { path: "assets/mark-C7qzi_Ij.svg", bytes: include_bytes!("assets/mark-C7qzi_Ij.svg.gz"), gzip: true },
    File { path: "assets/models-page-B9TFIw5V.js", bytes: include_bytes!("assets/models-page-B9TFIw5V.js.gz"), gzip: true },
    File { path: "assets/models-page-DVfIT3-m.css", bytes: include_bytes!("assets/models-page-DVfIT3-m.css.gz"), gzip: true },
    File { path: "assets/pdf-YwugTw7Y.js", bytes: include_bytes!("assets/pdf-YwugTw7Y.js.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CIqJB0yW.mjs", bytes: include_bytes!("assets/pdf.worker.min-CIqJB0yW.mjs.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CioIZagP.js", bytes: include_bytes!("assets/pdf.worker.min-CioIZagP.js.gz"), gzip: true },
    File { path: "assets/playground-page-BmutJZeB.js", bytes: include_bytes!("assets/playground-page-BmutJZeB.js.gz"), gzip: true },
    File { path: "assets/playground-page-puvaOtMB.css", bytes: include_bytes!("assets/playground-page-puvaOtMB.css.gz"), gzip: true },
    File { path: "assets/remark-math-8sF0SbG_.js", bytes: include_bytes!("assets/remark-math-8sF0SbG_.js.gz"), gzip: true },
    File { path: "assets/rolldown-runtime-XKyaHtl9.js", bytes: include_bytes!("assets/rolldown-runtime-XKyaHtl9.js.gz"), gzip: true },
    File { path: "assets/room-page-CFfGrAj5.js", bytes: include_bytes!("assets/room-page-CFfGrAj5.js.gz"), gzip: true },
    File { path: "assets/room-page-Cygy5atz.css", bytes: include_bytes!("assets/room-page-Cygy5atz.css.gz"), gzip: true },
    File { path: "assets/settings-page-C1EvSav_.css", bytes: include_bytes!("assets/settings-page-C1EvSav_.css.gz"), gzip: true },
    File { path: "assets/settings-page-FbDe8fIM.js", bytes: include_bytes!("assets/settings-page-FbDe8fIM.js.gz"), gzip: true },
    File { path: "assets/vendor-DQMvNm_X.js", bytes: include_bytes!("assets/vendor-DQMvNm_X.js.gz"), gzip: true },
    File { path: "index.html", bytes: include_bytes!("index.html.gz"), gzip: true },
    File { path: "licenses.txt", bytes: include_bytes!("licenses.txt.gz"), gzip: true },
];
