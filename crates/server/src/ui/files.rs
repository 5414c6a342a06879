//! Files of the page. `npm run build` in `ui/` writes them to `dist/` with a table. They are compressed with gzip,
//! which every browser accepts over plain HTTP (brotli is limited to TLS). Clients that do not accept gzip get them
//! decompressed.

use std::io::Read;

use axum::{
    extract::Path,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use flate2::read::GzDecoder;
use sha2::{Digest, Sha256};

use crate::error::ApiError;

/// One file of the page.
struct File {
    /// Path under `/ui/`.
    path: &'static str,
    /// Content as it is sent.
    bytes: &'static [u8],
    /// True if `bytes` is compressed with gzip.
    gzip: bool,
}

include!("dist/table.rs");

/// Content security policy: no external resources, inline scripts or inline styles.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; \
    font-src 'self'; connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; \
    frame-ancestors 'none'";

/// Serves `/ui/{path}`. Names of assets contain a hash of their content, so a browser loads each once.
///
/// # Errors
/// There is no such file.
pub async fn file(Path(path): Path<String>, headers: HeaderMap) -> Result<Response, ApiError> {
    let file = FILES.iter().find(|file| file.path == path && path != "index.html");
    let Some(file) = file else {
        return Err(ApiError::NotFound(format!("there is no file `{path}` of the page")));
    };
    let mut response = send(file, &headers);
    let is_hashed = path.starts_with("assets/");
    let cache = if is_hashed { "public, max-age=31536000, immutable" } else { "no-cache" };
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static(cache));
    Ok(response)
}

/// Serves the page itself. Browsers revalidate it on each visit.
pub fn index(headers: &HeaderMap) -> Response {
    let Some(file) = FILES.iter().find(|file| file.path == "index.html") else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let hash = Sha256::digest(file.bytes);
    let tag = hash[..8].iter().fold("\"".to_owned(), |tag, byte| format!("{tag}{byte:02x}")) + "\"";
    let known = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok());
    let mut response = if known.is_some_and(|known| known.contains(&tag)) {
        StatusCode::NOT_MODIFIED.into_response()
    } else {
        send(file, headers)
    };
    let headers = response.headers_mut();
    let own: [(HeaderName, &str); 4] = [
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    for (name, value) in own {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(tag) = HeaderValue::try_from(tag) {
        headers.insert(header::ETAG, tag);
    }
    response
}

fn send(file: &File, headers: &HeaderMap) -> Response {
    let is_sent_compressed = file.gzip && accepts_gzip(headers);
    let mut response = match file.gzip && !is_sent_compressed {
        true => unpacked(file.bytes).into_response(),
        false => file.bytes.into_response(),
    };
    let headers = response.headers_mut();
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type(file.path)));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if is_sent_compressed {
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// Returns the content of a compressed file, for clients behind proxies that drop `Accept-Encoding`.
fn unpacked(bytes: &[u8]) -> Vec<u8> {
    let mut content = Vec::new();
    // The files are a part of the program, and a test reads all of them.
    let _ = GzDecoder::new(bytes).read_to_end(&mut content);
    content
}

/// Returns true if a request accepts gzip. A request without `Accept-Encoding` does not.
fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).iter();
    let lists = values.filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).any(|item| {
        let (name, parameters) = item.split_once(';').unwrap_or((item, ""));
        let excluded = parameters.trim().strip_prefix("q=").is_some_and(|q| q.trim().parse() == Ok(0.0));
        !excluded && ["gzip", "x-gzip", "*"].iter().any(|known| name.trim().eq_ignore_ascii_case(known))
    })
}

fn content_type(path: &str) -> &'static str {
    match path.rsplit_once('.').map(|(_, extension)| extension) {
        Some("html") => "text/html; charset=utf-8",
        Some("js" | "mjs") => "text/javascript; charset=utf-8",
        Some("css") => "text/css; charset=utf-8",
        Some("svg") => "image/svg+xml",
        Some("woff2") => "font/woff2",
        Some("txt") => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_is_whole() {
        assert!(FILES.iter().any(|file| file.path == "index.html"));
        for file in FILES {
            assert_ne!(content_type(file.path), "application/octet-stream", "{}", file.path);
            assert_eq!(file.gzip, file.bytes.starts_with(&[0x1f, 0x8b]), "{}", file.path);
            if file.gzip {
                let mut content = Vec::new();
                GzDecoder::new(file.bytes).read_to_end(&mut content).unwrap();
                assert_eq!(unpacked(file.bytes), content, "{}", file.path);
                assert!(!content.is_empty(), "{}", file.path);
            }
        }
    }

    #[test]
    fn encodings_are_negotiated() {
        for (accept, fine) in [
            (Some("gzip, deflate, br"), true),
            (Some("br;q=1.0, *;q=0.1"), true),
            (None, false),
            (Some("identity"), false),
            (Some("gzip;q=0"), false),
            (Some(""), false),
        ] {
            let headers =
                accept.map(|accept| (header::ACCEPT_ENCODING, HeaderValue::try_from(accept).unwrap()));
            assert_eq!(accepts_gzip(&HeaderMap::from_iter(headers)), fine, "{accept:?}");
        }
    }
}
