// Written by `npm run build` in `ui/`.

/// Identifies this build of the page.
pub const PAGE: &str = "78befdcbc4a39b1b";

/// All files, by path.
const FILES: &[File] = &[
    File { path: "assets/format-tp55tXOa.js", bytes: include_bytes!("assets/format-tp55tXOa.js.gz"), gzip: true },
    File { path: "assets/index-CUGJSUmm.css", bytes: include_bytes!("assets/index-CUGJSUmm.css.gz"), gzip: true },
    File { path: "assets/index-Cm2yqLmu.js", bytes: include_bytes!("assets/index-Cm2yqLmu.js.gz"), gzip: true },
    File { path: "assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2", bytes: include_bytes!("assets/jetbrains-mono-latin-wght-normal-B9CIFXIH.woff2"), gzip: false },
    File { path: "assets/katex-BYLiqMcl.js", bytes: include_bytes!("assets/katex-BYLiqMcl.js.gz"), gzip: true },
    File { path: "assets/lowlight-weQvArn9.js", bytes: include_bytes!("assets/lowlight-weQvArn9.js.gz"), gzip: true },
    File { path: "assets/mark-C7qzi_Ij.svg", bytes: include_bytes!("assets/mark-C7qzi_Ij.svg.gz"), gzip: true },
    File { path: "assets/models-page-Dh1TwfAW.css", bytes: include_bytes!("assets/models-page-Dh1TwfAW.css.gz"), gzip: true },
    File { path: "assets/models-page-Dypy9jjX.js", bytes: include_bytes!("assets/models-page-Dypy9jjX.js.gz"), gzip: true },
    File { path: "assets/pdf-YwugTw7Y.js", bytes: include_bytes!("assets/pdf-YwugTw7Y.js.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CIqJB0yW.mjs", bytes: include_bytes!("assets/pdf.worker.min-CIqJB0yW.mjs.gz"), gzip: true },
    File { path: "assets/pdf.worker.min-CioIZagP.js", bytes: include_bytes!("assets/pdf.worker.min-CioIZagP.js.gz"), gzip: true },
    File { path: "assets/playground-page-DPAMjdSs.js", bytes: include_bytes!("assets/playground-page-DPAMjdSs.js.gz"), gzip: true },
    File { path: "assets/playground-page-puvaOtMB.css", bytes: include_bytes!("assets/playground-page-puvaOtMB.css.gz"), gzip: true },
    File { path: "assets/remark-math-BJOmJvdI.js", bytes: include_bytes!("assets/remark-math-BJOmJvdI.js.gz"), gzip: true },
    File { path: "assets/rolldown-runtime-XKyaHtl9.js", bytes: include_bytes!("assets/rolldown-runtime-XKyaHtl9.js.gz"), gzip: true },
    File { path: "assets/room-page-BQQZeX5W.js", bytes: include_bytes!("assets/room-page-BQQZeX5W.js.gz"), gzip: true },
    File { path: "assets/room-page-Cygy5atz.css", bytes: include_bytes!("assets/room-page-Cygy5atz.css.gz"), gzip: true },
    File { path: "assets/settings-page-C1EvSav_.css", bytes: include_bytes!("assets/settings-page-C1EvSav_.css.gz"), gzip: true },
    File { path: "assets/settings-page-DB_bK5TC.js", bytes: include_bytes!("assets/settings-page-DB_bK5TC.js.gz"), gzip: true },
    File { path: "assets/vendor-DQMvNm_X.js", bytes: include_bytes!("assets/vendor-DQMvNm_X.js.gz"), gzip: true },
    File { path: "index.html", bytes: include_bytes!("index.html.gz"), gzip: true },
    File { path: "licenses.txt", bytes: include_bytes!("licenses.txt.gz"), gzip: true },
];
