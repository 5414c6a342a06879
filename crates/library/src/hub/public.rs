//! Resolution of names to public addresses.

use std::io;

use ureq::{
    Error,
    config::Config,
    http::Uri,
    unversioned::{
        resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver},
        transport::NextTimeout,
    },
};

use super::client::{PRIVATE, is_public};

/// A resolver that refuses names with an address that is not public. The connection uses the addresses that were
/// checked, so a name cannot change in between.
#[derive(Debug, Default)]
pub(super) struct PublicResolver(DefaultResolver);

impl Resolver for PublicResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, Error> {
        let found = self.0.resolve(uri, config, timeout)?;
        if found.iter().all(|address| is_public(address.ip())) {
            return Ok(found);
        }
        Err(Error::Io(io::Error::other(PRIVATE)))
    }
}
