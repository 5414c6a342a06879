// Written by `npm run build` in `ui/`.

/// All files, by path.
const FILES: &[File] = &[
    File { path: "assets/format-B_ZKF4YZ.js", bytes: include_bytes!("assets/format-B_ZKF4YZ.js.gz"), gzip: true },
    File { path: "assets/index-BAKqnI1T.css", bytes: include_bytes!("assets/index-BAKqnI1T.css.gz"), gzip: true },
    File { path: "assets/index-BddS3Otb.js", bytes: include_bytes!("assets/index-BddS3Otb.js.gz"), gzip: true },
    File { path: "assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2", bytes: include_bytes!("assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2"), gzip: false },
    File { path: "assets/katex-BYLiqMcl.js", bytes: include_bytes!("assets/katex-BYLiqMcl.js.gz"), gzip: true },
    File { path: "assets/lowlight-CfGFUAW6.js", bytes: include_bytes!("assets/lowlight-CfGFUAW6.js.gz"), gzip: true },
    File { path: "assets/mark-C7qzi_Ij.svg", bytes: include_bytes!("assets/mark-C7qzi_Ij.svg.gz"), gzip: true },
    File { path: "assets/models-page-CoFPO8s2.js", bytes: include_bytes!("assets/models-page-CoFPO8s2.js.gz"), gzip: true },
    File { path: "assets/models-page-DGu0d6D5.css", bytes: include_bytes!("assets/models-page-DGu0d6D5.css.gz"), gzip: true },
    File { path: "assets/pdf-YwugTw7Y.js", bytes: include_bytes!("assets/pdf-YwugTw7Y.js.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CIqJB0yW.mjs", bytes: include_bytes!("assets/pdf.worker.min-CIqJB0yW.mjs.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CioIZagP.js", bytes: include_bytes!("assets/pdf.worker.min-CioIZagP.js.gz"), gzip: true },
    File { path: "assets/play-Dyj-EO_q.js", bytes: include_bytes!("assets/play-Dyj-EO_q.js.gz"), gzip: true },
    File { path: "assets/playground-page-D8HsKlFH.js", bytes: include_bytes!("assets/playground-page-D8HsKlFH.js.gz"), gzip: true },
    File { path: "assets/playground-page-puvaOtMB.css", bytes: include_bytes!("assets/playground-page-puvaOtMB.css.gz"), gzip: true },
    File { path: "assets/remark-math-FcKZi9qz.js", bytes: include_bytes!("assets/remark-math-FcKZi9qz.js.gz"), gzip: true },
    File { path: "assets/rolldown-runtime-XKyaHtl9.js", bytes: include_bytes!("assets/rolldown-runtime-XKyaHtl9.js.gz"), gzip: true },
    File { path: "assets/room-page-Cygy5atz.css", bytes: include_bytes!("assets/room-page-Cygy5atz.css.gz"), gzip: true },
    File { path: "assets/room-page-ax7kGqih.js", bytes: include_bytes!("assets/room-page-ax7kGqih.js.gz"), gzip: true },
    File { path: "assets/settings-page-B3mybrc0.js", bytes: include_bytes!("assets/settings-page-B3mybrc0.js.gz"), gzip: true },
    File { path: "assets/settings-page-frwqBc2t.css", bytes: include_bytes!("assets/settings-page-frwqBc2t.css.gz"), gzip: true },
    File { path: "assets/vendor-CzO_gUCg.js", bytes: include_bytes!("assets/vendor-CzO_gUCg.js.gz"), gzip: true },
    File { path: "index.html", bytes: include_bytes!("index.html.gz"), gzip: true },
    File { path: "licenses.txt", bytes: include_bytes!("licenses.txt.gz"), gzip: true },
];
