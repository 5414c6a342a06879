// Written by `npm run build` in `ui/`.

/// All files, by path.
const FILES: &[File] = &[
    File { path: "assets/format-C4E4rjt9.js", bytes: include_bytes!("assets/format-C4E4rjt9.js.gz"), gzip: true },
    File { path: "assets/index-Bv4ZevKv.css", bytes: include_bytes!("assets/index-Bv4ZevKv.css.gz"), gzip: true },
    File { path: "assets/index-DGiiMO1K.js", bytes: include_bytes!("assets/index-DGiiMO1K.js.gz"), gzip: true },
    File { path: "assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2", bytes: include_bytes!("assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2"), gzip: false },
    File { path: "assets/katex-BYLiqMcl.js", bytes: include_bytes!("assets/katex-BYLiqMcl.js.gz"), gzip: true },
    File { path: "assets/lowlight-IveI0X1Y.js", bytes: include_bytes!("assets/lowlight-IveI0X1Y.js.gz"), gzip: true },
    File { path: "assets/mark-C7qzi_Ij.svg", bytes: include_bytes!("assets/mark-C7qzi_Ij.svg.gz"), gzip: true },
    File { path: "assets/models-page-DXSWAjec.js", bytes: include_bytes!("assets/models-page-DXSWAjec.js.gz"), gzip: true },
    File { path: "assets/models-page-Dh1TwfAW.css", bytes: include_bytes!("assets/models-page-Dh1TwfAW.css.gz"), gzip: true },
    File { path: "assets/pdf-YwugTw7Y.js", bytes: include_bytes!("assets/pdf-YwugTw7Y.js.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CIqJB0yW.mjs", bytes: include_bytes!("assets/pdf.worker.min-CIqJB0yW.mjs.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CioIZagP.js", bytes: include_bytes!("assets/pdf.worker.min-CioIZagP.js.gz"), gzip: true },
    File { path: "assets/playground-page-CtllmMk6.js", bytes: include_bytes!("assets/playground-page-CtllmMk6.js.gz"), gzip: true },
    File { path: "assets/playground-page-puvaOtMB.css", bytes: include_bytes!("assets/playground-page-puvaOtMB.css.gz"), gzip: true },
    File { path: "assets/remark-math-Dlgh-dAr.js", bytes: include_bytes!("assets/remark-math-Dlgh-dAr.js.gz"), gzip: true },
    File { path: "assets/rolldown-runtime-XKyaHtl9.js", bytes: include_bytes!("assets/rolldown-runtime-XKyaHtl9.js.gz"), gzip: true },
    File { path: "assets/room-page-CnjrHHfz.js", bytes: include_bytes!("assets/room-page-CnjrHHfz.js.gz"), gzip: true },
    File { path: "assets/room-page-Cygy5atz.css", bytes: include_bytes!("assets/room-page-Cygy5atz.css.gz"), gzip: true },
    File { path: "assets/settings-page-BQWU8YL9.js", bytes: include_bytes!("assets/settings-page-BQWU8YL9.js.gz"), gzip: true },
    File { path: "assets/settings-page-C1EvSav_.css", bytes: include_bytes!("assets/settings-page-C1EvSav_.css.gz"), gzip: true },
    File { path: "assets/vendor-PM_bhu4i.js", bytes: include_bytes!("assets/vendor-PM_bhu4i.js.gz"), gzip: true },
    File { path: "index.html", bytes: include_bytes!("index.html.gz"), gzip: true },
    File { path: "licenses.txt", bytes: include_bytes!("licenses.txt.gz"), gzip: true },
];
