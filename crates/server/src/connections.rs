//! Sockets: accepting, time limits, and ending in good order.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{Limits, ServerError, ServerState, routes};

/// Pause after a failed accept: usually there are too many open files, and a connection has to end first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Failed accepts in a row after which the socket is taken for broken.
const MAX_ACCEPT_FAILURES: usize = 600;
/// Time for streams to write their last event once the grace period is over.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// About the longest request line and headers; reads come in blocks, so a little more may pass.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// How far the server is from its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Serving,
    /// Nothing new is accepted and running answers go on.
    Draining,
    /// Running answers end now, with an error.
    Ending,
}

/// Serves until `shutdown` completes; then running answers may finish within [`Limits::grace`], those that do not end
/// with an error event, and the function returns.
///
/// # Errors
///
/// If the socket stops accepting connections.
pub async fn serve(
    listener: TcpListener,
    state: ServerState,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServerError> {
    let limits = state.limits;
    let (phase_tx, phase) = watch::channel(Phase::Serving);
    let router = routes::router(state, phase.clone());
    let mut connections = JoinSet::new();
    let accepted = tokio::select! {
        () = shutdown => Ok(()),
        error = accept(&listener, &router, &phase, limits, &mut connections) => Err(error),
    };
    drop(listener);

    phase_tx.send_replace(Phase::Draining);
    if timeout(limits.grace, join_all(&mut connections)).await.is_err() {
        phase_tx.send_replace(Phase::Ending);
        // What still hangs after that is a client that does not read.
        let _ = timeout(LAST_WORDS, join_all(&mut connections)).await;
    }
    connections.shutdown().await;
    accepted
}

async fn join_all(connections: &mut JoinSet<()>) {
    while connections.join_next().await.is_some() {}
}

/// Accepts connections until the socket breaks.
async fn accept(
    listener: &TcpListener,
    router: &Router,
    phase: &watch::Receiver<Phase>,
    limits: Limits,
    connections: &mut JoinSet<()>,
) -> ServerError {
    let places = Arc::new(Semaphore::new(limits.max_connections));
    let mut num_failures = 0;
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            unreachable!("the semaphore is never closed")
        };
        match listener.accept().await {
            Ok((socket, _)) => {
                num_failures = 0;
                connections.spawn(converse(socket, router.clone(), phase.clone(), limits, place));
            }
            Err(reason) if num_failures == MAX_ACCEPT_FAILURES => return ServerError::Accept { reason },
            Err(error) => {
                num_failures += 1;
                tracing::warn!(%error, num_failures, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

/// Answers the requests of one connection.
async fn converse(
    socket: TcpStream,
    router: Router,
    mut phase: watch::Receiver<Phase>,
    limits: Limits,
    _place: OwnedSemaphorePermit,
) {
    // Tokens are small and must not wait for each other.
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let service = TowerToHyperService::new(router);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .max_header_size(MAX_HEADER_BYTES)
        .max_buf_size(MAX_HEADER_BYTES)
        .serve_connection(TokioIo::new(socket), service);
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = phase.wait_for(|phase| *phase >= Phase::Draining) => None,
    };
    let ended = match ended {
        Some(ended) => ended,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}
