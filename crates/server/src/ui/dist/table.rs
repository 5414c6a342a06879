// Written by `npm run build` in `ui/`.

/// All files, by path.
const FILES: &[File] = &[
    File { path: "assets/format-B_ZKF4YZ.js", bytes: include_bytes!("assets/format-B_ZKF4YZ.js.gz"), gzip: true },
    File { path: "assets/index-BAKqnI1T.css", bytes: include_bytes!("assets/index-BAKqnI1T.css.gz"), gzip: true },
    File { path: "assets/index-CwPOu-qw.js", bytes: include_bytes!("assets/index-CwPOu-qw.js.gz"), gzip: true },
    File { path: "assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2", bytes: include_bytes!("assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2"), gzip: false },
    File { path: "assets/katex-BYLiqMcl.js", bytes: include_bytes!("assets/katex-BYLiqMcl.js.gz"), gzip: true },
    File { path: "assets/lowlight-Dmcpdr7h.js", bytes: include_bytes!("assets/lowlight-Dmcpdr7h.js.gz"), gzip: true },
    File { path: "assets/mark-C7qzi_Ij.svg", bytes: include_bytes!("assets/mark-C7qzi_Ij.svg.gz"), gzip: true },
    File { path: "assets/models-page-Bgd5zC2u.js", bytes: include_bytes!("assets/models-page-Bgd5zC2u.js.gz"), gzip: true },
    File { path: "assets/models-page-DGu0d6D5.css", bytes: include_bytes!("assets/models-page-DGu0d6D5.css.gz"), gzip: true },
    File { path: "assets/pdf-YwugTw7Y.js", bytes: include_bytes!("assets/pdf-YwugTw7Y.js.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CIqJB0yW.mjs", bytes: include_bytes!("assets/pdf.worker.min-CIqJB0yW.mjs.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CioIZagP.js", bytes: include_bytes!("assets/pdf.worker.min-CioIZagP.js.gz"), gzip: true },
    File { path: "assets/play-Dyj-EO_q.js", bytes: include_bytes!("assets/play-Dyj-EO_q.js.gz"), gzip: true },
    File { path: "assets/playground-page-D_8GFE_7.js", bytes: include_bytes!("assets/playground-page-D_8GFE_7.js.gz"), gzip: true },
    File { path: "assets/playground-page-puvaOtMB.css", bytes: include_bytes!("assets/playground-page-puvaOtMB.css.gz"), gzip: true },
    File { path: "assets/remark-math-Bh7fQ0hu.js", bytes: include_bytes!("assets/remark-math-Bh7fQ0hu.js.gz"), gzip: true },
    File { path: "assets/rolldown-runtime-XKyaHtl9.js", bytes: include_bytes!("assets/rolldown-runtime-XKyaHtl9.js.gz"), gzip: true },
    File { path: "assets/room-page--MbGYHfU.js", bytes: include_bytes!("assets/room-page--MbGYHfU.js.gz"), gzip: true },
    File { path: "assets/room-page-Cygy5atz.css", bytes: include_bytes!("assets/room-page-Cygy5atz.css.gz"), gzip: true },
    File { path: "assets/settings-page-B_UPSbvs.js", bytes: include_bytes!("assets/settings-page-B_UPSbvs.js.gz"), gzip: true },
    File { path: "assets/settings-page-frwqBc2t.css", bytes: include_bytes!("assets/settings-page-frwqBc2t.css.gz"), gzip: true },
    File { path: "assets/vendor-CzO_gUCg.js", bytes: include_bytes!("assets/vendor-CzO_gUCg.js.gz"), gzip: true },
    File { path: "index.html", bytes: include_bytes!("index.html.gz"), gzip: true },
    File { path: "licenses.txt", bytes: include_bytes!("licenses.txt.gz"), gzip: true },
];
