class OffloadingConnectorStats:
    def increase_counter(
        self,
        counter_name: str,
        counter_increase_value: float = 1,
        labelvalues: tuple[str, ...] = (),
    ) -> None: ...
    def set_gauge(
        self, gauge_name: str, gauge_value: float, labelvalues: tuple[str, ...] = ()
    ) -> None: ...
    def observe_histogram(
        self, histogram_name: str, histogram_value: float, labelvalues: tuple[str, ...] = ()
    ) -> None: ...
