// Written by `npm run build` in `ui/`.

/// Identifies this build of the page.
pub const PAGE: &str = "5f232c9fd1dd866e";

/// All files, by path.
const FILES: &[File] = &[
    File { path: "assets/format-BzsnGGgO.js", bytes: include_bytes!("assets/format-BzsnGGgO.js.gz"), gzip: true },
    File { path: "assets/index-CPJf9noD.js", bytes: include_bytes!("assets/index-CPJf9noD.js.gz"), gzip: true },
    File { path: "assets/index-Da6tdpHk.css", bytes: include_bytes!("assets/index-Da6tdpHk.css.gz"), gzip: true },
    File { path: "assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2", bytes: include_bytes!("assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2"), gzip: false },
    File { path: "assets/katex-BYLiqMcl.js", bytes: include_bytes!("assets/katex-BYLiqMcl.js.gz"), gzip: true },
    File { path: "assets/lowlight-PT40X3IA.js", bytes: include_bytes!("assets/lowlight-PT40X3IA.js.gz"), gzip: true },
    File { path: "assets/mark-C7qzi_Ij.svg", bytes: include_bytes!("assets/mark-C7qzi_Ij.svg.gz"), gzip: true },
    File { path: "assets/models-page-B4edo11D.js", bytes: include_bytes!("assets/models-page-B4edo11D.js.gz"), gzip: true },
    File { path: "assets/models-page-DVfIT3-m.css", bytes: include_bytes!("assets/models-page-DVfIT3-m.css.gz"), gzip: true },
    File { path: "assets/pdf-YwugTw7Y.js", bytes: include_bytes!("assets/pdf-YwugTw7Y.js.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CIqJB0yW.mjs", bytes: include_bytes!("assets/pdf.worker.min-CIqJB0yW.mjs.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CioIZagP.js", bytes: include_bytes!("assets/pdf.worker.min-CioIZagP.js.gz"), gzip: true },
    File { path: "assets/playground-page-QEjS4_mb.js", bytes: include_bytes!("assets/playground-page-QEjS4_mb.js.gz"), gzip: true },
    File { path: "assets/playground-page-puvaOtMB.css", bytes: include_bytes!("assets/playground-page-puvaOtMB.css.gz"), gzip: true },
    File { path: "assets/remark-math-D29UFXw8.js", bytes: include_bytes!("assets/remark-math-D29UFXw8.js.gz"), gzip: true },
    File { path: "assets/rolldown-runtime-XKyaHtl9.js", bytes: include_bytes!("assets/rolldown-runtime-XKyaHtl9.js.gz"), gzip: true },
    File { path: "assets/room-page-C4srY1X6.js", bytes: include_bytes!("assets/room-page-C4srY1X6.js.gz"), gzip: true },
    File { path: "assets/room-page-Cygy5atz.css", bytes: include_bytes!("assets/room-page-Cygy5atz.css.gz"), gzip: true },
    File { path: "assets/settings-page-C1EvSav_.css", bytes: include_bytes!("assets/settings-page-C1EvSav_.css.gz"), gzip: true },
    File { path: "assets/settings-page-DN02z5_k.js", bytes: include_bytes!("assets/settings-page-DN02z5_k.js.gz"), gzip: true },
    File { path: "assets/vendor-DQMvNm_X.js", bytes: include_bytes!("assets/vendor-DQMvNm_X.js.gz"), gzip: true },
    File { path: "index.html", bytes: include_bytes!("index.html.gz"), gzip: true },
    File { path: "licenses.txt", bytes: include_bytes!("licenses.txt.gz"), gzip: true },
];
